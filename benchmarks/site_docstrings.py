"""Docstrings are written for `help()`; on the site doctests and aligned formulas get fences, and public names links."""

import re
from typing import Any

import griffe

from benchmarks.reference_table import public_names

SECTION = re.compile(r"\w+:\n")
FORMULA = re.compile(r"\S {3,}\S|\n +\S")
NAME = re.compile(r"(?<![`\[])`(?:qat\.)?(?:\w+\.)?(\w+)`(?!`)")


class Fences(griffe.Extension):  # type: ignore[misc]
    """The extension that mkdocs.yml names."""

    def __init__(self) -> None:
        self.places = {name.rpartition(".")[2]: name for name in public_names()}

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite one docstring, paragraph by paragraph."""
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(self.rewritten, obj.docstring.value.split("\n\n")))

    def rewritten(self, paragraph: str) -> str:
        """A paragraph as Markdown."""
        if paragraph.startswith(">>>"):
            return f"```pycon\n{paragraph}\n```"
        if paragraph.startswith("    "):
            return paragraph
        if FORMULA.search(paragraph) and not SECTION.match(paragraph) and not paragraph.startswith("- "):
            return f"```text\n{paragraph}\n```"
        return NAME.sub(self.link, paragraph)

    def link(self, match: re.Match[str]) -> str:
        """A name as a link, if it is public."""
        return f"[{match[0]}][{self.places[match[1]]}]" if match[1] in self.places else match[0]
