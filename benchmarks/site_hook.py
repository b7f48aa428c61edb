"""What mkdocs needs for pages that are written for GitHub: API pages, and links that lead out of docs/."""

import re
from pathlib import Path
from typing import Any

from benchmarks.api_pages import api_pages
from benchmarks.reference_table import public_names

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")
ROW = re.compile(r"^\| \[?(`(\w+).*?`)(?:\]\([^)]*\))? \|", re.MULTILINE)
OPEN_FENCE = re.compile(r"^( *```python) sketch$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the API pages."""
    from mkdocs.structure.files import File

    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Names on the page of names lead to the API; of a link that leads out of docs/, or to a folder, the text stays."""
    folder = Path(page.file.src_uri).parent
    if page.file.src_uri == "reference.md":
        places = {name.rpartition(".")[2]: name for name in public_names()}
        markdown = ROW.sub(lambda row: f"| [{row[1]}][{places[row[2]]}] |", markdown)

    def link(match: re.Match[str]) -> str:
        there = (Path(config.docs_dir) / folder / match[2]).resolve()
        leads_out = there.exists() and (there.is_dir() or not there.is_relative_to(config.docs_dir))
        return match[1] if leads_out else match[0]

    return OPEN_FENCE.sub(r"\1", LINK.sub(link, markdown))
