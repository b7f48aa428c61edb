"""The report of a run folder: what stands out, which figures there are, and that the page needs nothing else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qat.training.report import figures, page
from qat.training.report.figures import FIGURES
from qat.training.report.findings import ReportedRun, findings
from qat.training.report.page import NO_MATPLOTLIB, write_report
from qat.training.run.logging import RunLog

NAMES = ("conv1_quantizer", "conv1.weight_quantizer", "fc.weight_quantizer")
HEALTHY: dict[str, dict[str, list[float]]] = {
    "scale": {key: [1.0, 1.05, 1.1] for key in NAMES},
    "levels": {key: [0.9, 0.9, 0.9] for key in NAMES},
    "clipped_low": {key: [0.0, 0.0, 0.0] for key in NAMES},
    "clipped_high": {key: [0.0, 0.001, 0.001] for key in NAMES},
    "sqnr": {key: [40.0, 40.0, 40.0] for key in NAMES},
    "oscillating": {key: [0.02, 0.01, 0.0] for key in NAMES[1:]},
}
SUMMARY = {
    "float": {"top1": 98.0, "size_bytes": 4000, "by_class": {"<cat>": 97.0, "dog": 99.0, "nowhere": None}},
    "calibrated": {"top1": 97.0}, "epochs": 3, "val_images": 1000,
    "qat": {"top1": 98.2, "epochs": 3, "epoch": 3, "weights": "last",
            "by_class": {"<cat>": 97.0, "dog": 95.0, "nowhere": None}},
    "seconds": 12.0, "warnings": [], "problem": None,
    "onnx": {"top1": 98.2, "agreement": 1.0, "size_bytes": 1000,
             "layers": {"differing": 1, "elements": 9, "compared": 2}},
    "versions": {"qat": "0.1.0"}, "machine": {"threads": 2},
}  # fmt: skip
ANALYSIS: dict[str, Any] = {
    "order": list(NAMES),
    "layers": [{"name": name, "local": 40.0, "cumulative": 38.0} for name in ("conv1", "conv2", "fc")]
    + [{"name": "output", "local": None, "cumulative": 37.0}],
    "cost": [{"name": "conv1", "weight_bits": 8, "activation_bits": 8}],
    "batch_norm": {"bn1": 0.02},
    "answers": {"answers": 1000, "classes": ["<cat>", "dog"], "changes": [[0, 0, 1, 3]]},
    "pictures": {"columns": ["truth", "float", "QAT"], "differing": [9.0, 0.5], "unit": "boxes differ"},
}  # fmt: skip


def write_run(folder: Path, curves: dict[str, dict[str, list[float]]], summary: Any = SUMMARY, **analysis: Any) -> Path:
    """A run folder with these curves of quantizers, and with what a healthy run has otherwise."""
    with RunLog(folder) as log:
        for number in range(3):
            plain = {"loss": 1 / (number + 1), "top1": 90.0 + number, "lr": 0.1, "data_wait": 0.05}
            drawn = {
                f"quantizer_{kind}/{name}": points[number]
                for kind, rows in (HEALTHY | curves).items()
                for name, points in rows.items()
            }
            log.scalars("float", "train", plain, number)
            log.scalars("qat", "train", plain | drawn, 10 * (number + 1))
            log.scalars("qat", "val", {"loss": 0.5, "top1": 92.0}, 10 * (number + 1))
    (folder / "config.yaml").write_text("name: <tiny>\n")
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "analysis.json").write_text(json.dumps(ANALYSIS | analysis))
    return folder


class Page(HTMLParser):
    """What a page loads, which sections it has, and whether its elements close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads, self.sections, self.open = list[str](), list[str](), list[str]()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [str(found[key]) for key in ("src", "href", "xlink:href", "data") if key in found]
        if tag == "section":
            self.sections.append(str(found["id"]))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_has_every_figure_and_needs_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {})
    (run / "sensitivity.json").write_text(
        json.dumps({"images": 9, "float": {"loss": 1.0}, "layers": [{"name": "fc", "only": {"weight": {"loss": 2.0}}}]})
    )
    Image.new("RGB", (30, 20)).save(run / "answers.png")
    assert write_report(run / "report.html", [ReportedRun(run)], pictures=True) == []
    text = (run / "report.html").read_text()
    found = Page(text)
    assert found.sections == ["summary", *FIGURES, "answers", "config"]
    assert all(each.startswith(("#", "data:")) for each in found.loads)
    assert not re.search(r"@import|url\(\s*['\"]?https?:", text)
    assert {path.stem for path in (run / "figures").iterdir()} == FIGURES.keys() - {"results"}
    assert (run / "results.png").read_bytes().startswith(b"\x89PNG")
    assert figures.INK not in text and "currentColor" in text  # figures take the colours of the page
    assert "&lt;cat&gt;" in text and "<cat>" not in text and "&lt;tiny&gt;" in text
    assert "Nothing stands out." in text


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [ReportedRun(write_run(tmp_path / name, {})) for name in ("one", "two")]
    write_report(tmp_path / "both.html", runs)
    text = (tmp_path / "both.html").read_text()
    assert Page(text).sections[:2] == ["summary", "results"]
    assert text.count("<h3>one</h3>") == text.count("<h3>two</h3>") == text.count("<svg") / 2 + 3
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "both.html"}


def test_a_run_that_is_not_finished_shows_what_it_has(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {}, summary=None)
    (run / "analysis.json").write_text('{"layers": [{"na')  # killed while it was written by hand
    write_report(run / "report.html", [ReportedRun(run)])
    found = Page((run / "report.html").read_text())
    assert found.sections == ["summary", "results", "scales", "clipping", "oscillation", "answers", "config"]
    (empty := tmp_path / "empty").mkdir()
    write_report(empty / "report.html", [ReportedRun(empty)])
    assert "The run is not finished" in (empty / "report.html").read_text()


def test_without_matplotlib_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "can_draw", lambda: False)
    run = write_run(tmp_path / "run", {})
    assert write_report(run / "report.html", [ReportedRun(run)], pictures=True) == [NO_MATPLOTLIB]
    assert Page((run / "report.html").read_text()).sections == ["summary", "answers", "config"]
    assert not (run / "figures").exists()


LAYERS = [{**row, "local": 20.0 if row["name"] == "fc" else row["local"]} for row in ANALYSIS["layers"]]
ALL = {key: [0.6, 1.2, 0.7] for key in NAMES}
SICK: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("collapsed", {"at_floor": {NAMES[0]: [0.0, 1.0, 1.0]}}, {}, "Scales have collapsed onto their floor in conv1_"),
    ("a rate too high", {"scale": {NAMES[2]: [1.2, 1.6, 2.1]}}, {}, "1 of 1 scales moved by more than a factor of 2"),
    ("jumps", {"scale": ALL}, {}, "3 of 3 scales moved by more than a factor of 2, or by half"),
    ("BatchNorm", {}, {"batch_norm": {"bn1": 0.9, "bn2": 0.1}}, "The running statistics of 1 BatchNorms are not those"),
    ("clipping", {"clipped_low": {NAMES[0]: [0, 0, 0.2]}, "sqnr": {NAMES[0]: [40, 40, 20]}}, {},
     "More than 5 % of the values are clipped in conv1"),
    ("levels", {"levels": {NAMES[1]: [0.1, 0.1, 0.1]}}, {}, "Less than 25 % of the levels occur in conv1.weight"),
    ("oscillation", {"oscillating": {NAMES[2]: [0, 0.1, 0.1]}}, {}, "More than 5 % of the weights still turn round"),
    ("a layer", {}, {"layers": LAYERS}, "fc loses more than 12 dB beyond the other layers"),
]  # fmt: skip


@pytest.mark.parametrize(("curves", "analysis", "sentence"), [row[1:] for row in SICK], ids=[row[0] for row in SICK])
def test_every_illness_has_its_sentence(
    curves: dict[str, Any], analysis: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    assert findings(ReportedRun(write_run(tmp_path / "healthy", {}))) == []
    found = findings(ReportedRun(write_run(tmp_path / "sick", curves, **analysis)))
    assert len(found) == 1 and found[0].startswith(sentence)


def score(loss: float) -> dict[str, float]:
    return {"top1": 90.0, "loss": loss, "noise_to_baseline": 0.01, "noise_to_float": 0.01}


@pytest.mark.parametrize(
    ("bits", "advice"), [(8, "at 8 bits what is left is float (skip: true in "), (4, "give more b")]
)
def test_a_layer_that_loses_more_is_advised_what_is_possible(bits: int, advice: str, tmp_path: Path) -> None:
    """Points 35 and 60: no more bits than targets take, and nothing that `sensitivity` of the run contradicts."""
    layers = [{**row, "local": {20.0: 20.0 - 6 * (8 - bits)}.get(row["local"], row["local"])} for row in LAYERS]
    cost = [{"name": "fc", "weight_bits": bits, "activation_bits": 8}]
    run = write_run(tmp_path, {}, layers=layers, cost=cost)
    [said] = findings(ReportedRun(run))
    assert said.startswith("fc loses more than 12 dB beyond the other layers: " + advice)
    for loss, expected in ((0.5, [said]), (1.0, [])):  # all but it is better by half, or as bad as the whole
        row = {"name": "fc", "only": {"both": score(0.5)}, "all_but": {"both": score(loss)}}
        measured = {"baseline": score(1.0), "float": score(0.1), "layers": [row]}
        (run / "sensitivity.json").write_text(json.dumps(measured))
        assert findings(ReportedRun(run)) == expected


def test_a_layer_in_the_healthy_range_needs_no_advice(tmp_path: Path) -> None:
    """Point 60: docs/curves.md calls 29.7 dB healthy, however far above the others are."""
    layers = [{**row, "local": 29.7 if row["name"] == "fc" else 45.0} for row in ANALYSIS["layers"]]
    assert findings(ReportedRun(write_run(tmp_path, {}, layers=layers))) == []


ADVICE = [
    ({"scale": {NAMES[2]: [1.2, 1.6, 2.1]}}, {}, "qat: {quantizer_lr: 0.1}", "leave qat.quantizer_lr out, or lower it"),
    ({}, {"batch_norm": {"bn1": 0.9}}, "qat: {bn_reestimate: always}", "set qat.bn_reestimate: always"),
    ({"oscillating": {NAMES[2]: [0, 0.1, 0.1]}}, {}, "qat: {oscillation: {freeze: 0.01}}", "try qat.oscillation"),
    ({"clipped_low": {NAMES[0]: [0, 0, 0.2]}, "sqnr": {NAMES[0]: [40, 40, 20]}}, {},
     "quantization: {weight: {init: minmax}, activation: {init: minmax}}", "init: minmax"),
]  # fmt: skip


@pytest.mark.parametrize(("curves", "analysis", "config", "advice"), ADVICE)
def test_the_advice_goes_by_the_config(
    curves: dict[str, Any], analysis: dict[str, Any], config: str, advice: str, tmp_path: Path
) -> None:
    """Point 35: no advice to leave out what was left out, or to set what is set."""
    run = write_run(tmp_path, curves, **analysis)
    said = []
    for text in ("name: x", config):
        (run / "config.yaml").write_text(f"{text}\n")
        said += findings(ReportedRun(run))
    assert len(said) == 2 and (advice in said[0]) != (advice in said[1])


def test_the_class_that_loses_most_is_named_and_comes_first(tmp_path: Path) -> None:
    before = {f"class {number}": 60.0 + number for number in range(40)} | {"nowhere": None}
    after = {**before, "class 7": 61.0, "class 9": 65.5}
    summary = {**SUMMARY, "float": {"map": 80.0, "by_class": before}, "qat": {"map": 80.0, "by_class": after}}
    sick, healthy = (
        ReportedRun(write_run(tmp_path / name, {}, each)) for name, each in (("a", summary), ("b", SUMMARY))
    )
    assert findings(healthy) == []
    assert findings(sick) == ["Of all classes, 'class 7' loses most from float to QAT: 67.0 % become 61.0 %."]
    with figures.styled():
        drawn = figures.classes(sick)
    assert drawn is not None and drawn.axes[0].get_xlabel() == "AP %"
    assert [each.get_text() for each in drawn.axes[0].get_yticklabels()][:3] == ["class 7", "class 9", "class 0"]
    assert [[round(float(bar.get_width()), 1) for bar in bars][:2] for bars in drawn.axes[0].containers][::2] == [
        [67.0, 69.0], [61.0, 65.5],
    ]  # fmt: skip
    assert len(drawn.axes[0].get_yticks()) == 30


def test_what_the_run_itself_says_comes_first(tmp_path: Path) -> None:
    worse = {**SUMMARY, "qat": {**SUMMARY["qat"], "top1": 90.0}, "problem": "it differs", "warnings": ["qat: slow"]}  # type: ignore[dict-item]
    found = findings(ReportedRun(write_run(tmp_path / "run", {}, worse)))
    assert found[:2] == ["The file is not the trained model: it differs.", "qat: slow."]
    assert found[2].startswith("QAT ends 8.0 points below the float model, more than chance explains (±2.1 on 1,000")
