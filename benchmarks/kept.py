"""Kept results as lines of JSON, and tables in Markdown: what every renderer of a document needs."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def kept(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none while there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int | None = None) -> str:
    """A table in Markdown; columns behind the first `text_columns` are numbers, at the right."""
    texts = len(titles) if text_columns is None else text_columns
    rule = "|" + "---|" * texts + "---:|" * (len(titles) - texts)
    return "\n".join([line(titles), rule, *map(line, rows)]) + "\n"


def line(cells: Sequence[str]) -> str:
    """One row of a table."""
    return f"| {' | '.join(cells)} |"
