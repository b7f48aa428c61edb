"""`report.html`: one or several runs on a page that needs nothing else."""

import json
from html import escape
from pathlib import Path
from typing import Any

from qat.text import table
from qat.training.report.drawing import can_draw, rendered, styled
from qat.training.report.figures import FIGURES
from qat.training.report.findings import findings
from qat.training.report.run import ReportedRun
from qat.training.run.files import replacing
from qat.training.run.folder import PICTURES, RESULTS
from qat.training.run.report import report_lines

NO_MATPLOTLIB = "report: matplotlib is not installed, so it has no figures; pip install matplotlib"

MOST_CHANGES = 12
"""Rows of the table of changed answers."""

CSS = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def write_report(path: Path, runs: list[ReportedRun], *, pictures: bool = False) -> list[str]:
    """Write the page; with `pictures` also each figure as PNG beside it. What could not be shown, in sentences."""
    drawn: dict[str, list[str]] = {key: [] for key in FIGURES}
    said = [] if can_draw() else [NO_MATPLOTLIB]
    if not said:
        with styled():
            for run in runs:
                for key, shown in FIGURES.items():
                    place = path.parent / (RESULTS if key == "results" else f"{PICTURES}/{key}.png")
                    if pictures:
                        place.unlink(missing_ok=True)  # of an earlier report
                    figure = shown.draw(run)
                    if figure is None:
                        continue
                    svg, picture = rendered(figure)
                    drawn[key].append(f"<div>{_run_name(run, runs)}{svg}</div>")
                    if pictures:
                        place.parent.mkdir(exist_ok=True)
                        picture.save(place)
    with replacing(path) as temporary:
        temporary.write_text(_page(runs, drawn), encoding="utf-8")
    return said


def _page(runs: list[ReportedRun], drawn: dict[str, list[str]]) -> str:
    title = " · ".join(run.name for run in runs)
    sections = [
        f'<section id="{key}"><h2>{shown.title}</h2><p class="healthy">{escape(shown.healthy)}</p>'
        f'<div class="runs">{"".join(drawn[key])}</div></section>'
        for key, shown in FIGURES.items()
        if drawn[key]
    ]
    links = "".join(f'<a href="#{key}">{shown.title}</a>' for key, shown in FIGURES.items() if drawn[key])
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<nav>{links}<a href="#config">Config</a></nav>',
        _side_by_side(runs, "summary", _overview),
        f'<main class="{"one" if len(runs) == 1 else "several"}">{"".join(sections)}</main>',
        _side_by_side(runs, "answers", _answers),
        _side_by_side(runs, "config", _details),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{CSS}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _side_by_side(runs: list[ReportedRun], key: str, part: Any) -> str:
    cells = "".join(f"<div>{_run_name(run, runs)}{part(run)}</div>" for run in runs)
    return f'<section id="{key}"><div class="runs">{cells}</div></section>'


def _run_name(run: ReportedRun, runs: list[ReportedRun]) -> str:
    return f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""


def _overview(run: ReportedRun) -> str:
    """What stands out, and the table with which the run ended."""
    found = findings(run)
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in found)
    said = f'<ul class="findings">{sentences}</ul>' if found else '<p class="fine">Nothing stands out.</p>'
    lines = "\n".join(report_lines(run.summary)) if run.summary else ""
    return f"<h2>What stands out</h2>{said}<pre>{escape(lines)}</pre>"


def _answers(run: ReportedRun) -> str:
    """How many answers changed, and the most frequent changes."""
    answers = run.analysis.get("answers")
    if not answers:
        return ""
    names, changes = answers["classes"], answers["changes"]
    total = sum(number for *_, number in changes)
    rows = [[*(names[each] for each in classes), str(number)] for *classes, number in changes[:MOST_CHANGES]]
    lines = table([["truth", "float says", "integers say", "images"], *rows]) if rows else []
    said = f"{total:,} of {answers['images']:,} answers are not the float model's"
    return f"<h2>Answers</h2><pre>{escape(chr(10).join([said, '', *lines]))}</pre>"


def _details(run: ReportedRun) -> str:
    versions = json.dumps({key: run.summary.get(key) for key in ("versions", "machine")}, indent=1)
    return (
        f"<h2>Config and versions</h2><details><summary>config.yaml</summary><pre>{escape(run.config)}</pre></details>"
        f"<details><summary>versions and machine</summary><pre>{escape(versions)}</pre></details>"
    )
