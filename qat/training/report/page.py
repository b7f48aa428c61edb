"""Report of a run: report.html, a page that needs no other file, and TensorBoard."""

import inspect
import json
from html import escape
from pathlib import Path

import numpy as np
from PIL import Image

from qat.text import table
from qat.training.config.file import dump_config, flat
from qat.training.config.schema import RunConfig
from qat.training.report.figures import FIGURES, can_draw, rendered, styled
from qat.training.report.findings import ReportedRun, findings
from qat.training.run.folder import LAYERS, PICTURES, REPORT, RESULTS, Json, replacing
from qat.training.run.logging import RunLog
from qat.training.run.report import report_lines
from qat.training.tasks.known import score_of, task_in

NO_MATPLOTLIB = "report: matplotlib is not installed, so it has no figures; pip install matplotlib"
MOST_CHANGES = 12  # rows of the table of changed answers
CSS = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def write_report(path: Path, runs: list[ReportedRun], *, pictures: bool = False) -> list[str]:
    """Write the page, and `pictures` of it as PNG; return what could not be shown."""
    drawn: dict[str, list[str]] = {key: [] for key in FIGURES}
    said = [] if can_draw() else [NO_MATPLOTLIB]
    for key, draw in ({} if said else FIGURES).items():
        place = _picture(path.parent, key)
        if pictures:
            place.unlink(missing_ok=True)  # of an earlier report
        for run in runs:
            with styled():
                figure = draw(run)
                if figure is None:
                    continue
                svg, picture = rendered(figure)
            drawn[key].append(_part(run, runs, svg))
            if pictures:
                place.parent.mkdir(exist_ok=True)
                picture.save(place)
    with replacing(path) as temporary:
        temporary.write_text(_page(runs, drawn), encoding="utf-8")
    return said


def _picture(folder: Path, key: str) -> Path:
    return folder / (RESULTS if key == "results" else f"{PICTURES}/{key}.png")


def _part(run: ReportedRun, runs: list[ReportedRun], content: str) -> str:
    return f"<div>{f'<h3>{escape(run.name)}</h3>' if len(runs) > 1 else ''}{content}</div>"


def _page(runs: list[ReportedRun], drawn: dict[str, list[str]]) -> str:
    title = escape(" · ".join(run.name for run in runs))
    links, figures = "", ""
    for key in filter(drawn.get, FIGURES):
        name, _, healthy = inspect.cleandoc(FIGURES[key].__doc__ or "").partition("\n\n")
        links += f'<a href="#{key}">{name}</a>'
        figures += f'<section id="{key}"><h2>{name}</h2><p class="healthy">{escape(healthy)}</p>'
        figures += f'<div class="runs">{"".join(drawn[key])}</div></section>'
    summary, answers, config = (
        f'<section id="{key}"><div class="runs">{"".join(_part(run, runs, part(run)) for run in runs)}</div></section>'
        for key, part in (("summary", _overview), ("answers", _answers), ("config", _details))
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f'<style>{CSS}</style></head><body><h1>{title}</h1><nav>{links}<a href="#config">Config</a></nav>{summary}'
        f'<main class="{"one" if len(runs) == 1 else "several"}">{figures}</main>{answers}{config}</body></html>\n'
    )


def _overview(run: ReportedRun) -> str:
    found = findings(run)
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in found)
    said = f'<ul class="findings">{sentences}</ul>' if found else '<p class="fine">Nothing stands out.</p>'
    lines = "\n".join(report_lines(run.summary)) if run.summary else ""
    return f"<h2>What stands out</h2>{said}<pre>{escape(lines)}</pre>"


def _answers(run: ReportedRun) -> str:
    answers = run.analysis.get("answers")
    if not answers:
        return ""
    names, changes = answers["classes"], answers["changes"]
    total = sum(number for *_, number in changes)
    rows = [[*(names[each] for each in classes), str(number)] for *classes, number in changes[:MOST_CHANGES]]
    lines = table([["truth", "float says", "integers say", "answers"], *rows]) if rows else []
    said = f"{total:,} of {answers['answers']:,} answers are not the float model's"
    return f"<h2>Answers</h2><pre>{escape(chr(10).join([said, '', *lines]))}</pre>"


def _details(run: ReportedRun) -> str:
    versions = json.dumps({key: run.summary.get(key) for key in ("versions", "machine")}, indent=1)
    return (
        f"<h2>Config and versions</h2><details><summary>config.yaml</summary><pre>{escape(run.config)}</pre></details>"
        f"<details><summary>versions and machine</summary><pre>{escape(versions)}</pre></details>"
    )


def finish(log: RunLog, config: RunConfig, summary: Json, step: int) -> None:
    """Write the report of a run, and add its text and figures to TensorBoard."""
    if config.watch == "off":
        return
    from torch.utils.tensorboard.summary import hparams

    said = write_report(log.folder / REPORT, [ReportedRun(log.folder)], pictures=True)
    log.say("\n".join([*said, f"report: {log.folder / REPORT}"]))
    writer = log.writer()
    layers = (log.folder / LAYERS).read_text(encoding="utf-8")
    for tag, text in (("config", dump_config(config)), ("layers", layers)):
        writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()))
    metric = task_in(summary.get("qat", {})).metric
    scores = {f"{key}_{metric}": score_of(summary.get(key, {})) for key in ("float", "calibrated", "qat", "onnx")}
    found = {**scores, "agreement": summary.get("onnx", {}).get("agreement"), "seconds": summary["seconds"]}
    metrics = {f"final/{key}": float(value) for key, value in found.items() if value is not None}
    given = flat(config.model_dump(mode="json", exclude_defaults=True))
    row = {key: value for key, value in given.items() if isinstance(value, bool | int | float | str)}
    for summary_of in hparams(row, metrics):  # type: ignore[no-untyped-call]
        writer.file_writer.add_summary(summary_of)
    for tag, value in metrics.items():
        writer.add_scalar(tag, value, step)
    for file in (_picture(log.folder, key) for key in FIGURES):
        if file.is_file():  # without matplotlib there is none
            with Image.open(file) as picture:
                writer.add_image(file.stem, np.asarray(picture.convert("RGB")), step, dataformats="HWC")
    writer.flush()
