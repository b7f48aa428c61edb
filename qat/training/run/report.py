"""Report at the end of a run: summary.json, and a table on the terminal."""

import json
import math
import platform
import re
from pathlib import Path

import torch

from qat.export.onnxruntime.session import multiplies_exactly
from qat.kernels.cpu import onednn, processor
from qat.text import table
from qat.training.config.schema import RunConfig
from qat.training.run.folder import Json, write_text
from qat.training.tasks.known import score_of, task_in

ROWS = {  # keys of the results (nested keys after a dot), and their names in the table, in its order
    "float": "float",
    "float_finetune": "float, fine-tuned as QAT",
    "calibrated": "calibrated (PTQ)",
    "qat": "QAT",
    "onnx": "ONNX Runtime, integers",
    "onnx.default_session": "ONNX Runtime, default session",
}


def write_summary(path: Path, config: RunConfig, about: Json, results: Json, seconds: float, problem: str) -> Json:
    """Write summary.json; `problem` says why the proof failed, "" if it holds."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    summary = {
        "name": config.name,
        "seed": config.seed,
        "epochs": config.qat.epochs,
        "exit_status": 1 if problem else 0,
        "problem": problem or None,
        **results,
        "seconds": round(seconds, 1),
        "about": {key: value for key, value in about.items() if key != "versions"},
        "versions": about["versions"],
        "machine": {
            "processor": named[1].strip() if named else platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "exact_integer_products": {
                "torch": onednn.is_exact_natively(),
                "onnxruntime_default": multiplies_exactly(with_option=False),
            },
            "taken_for": processor.asked_for(),
        },
    }
    write_text(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def report_lines(summary: Json) -> list[str]:
    """Return the lines that a run prints of its summary: table, noise, versions."""
    lines = [*table(table_rows(summary), numbers=True), ""]
    if "val_images" in summary:  # old summaries in benchmarks/results have none
        lines += noise_of(summary["qat"], summary["val_images"])
    threads = summary["machine"]["threads"]
    time = f"{summary['seconds']:.0f} s on {threads} thread{'' if threads == 1 else 's'}"
    if "onnx" in summary:
        said = "{differing:,} of {elements:,} integers differ over {compared} layers"
        time = f"{said.format(**summary['onnx']['layers'])}; {time}"
    versions = (f"{package} {number}" for package, number in summary["versions"].items())
    return [*lines, time, ", ".join(versions)]


def noise_of(result: Json, images: int) -> list[str]:
    if "top1" not in result:  # the mean of classes' shares has no such formula
        return []
    noise = f"+-{deviation_of(result['top1'], images):.1f} points (two standard deviations)"
    return [f"top1 is of {images:,} images: {noise} on others"]


def deviation_of(top1: float, images: int) -> float:
    """Return two standard deviations of an accuracy in percent.

    Near 0 and 100, where this falls to 0, it is the rule of three: 3 in n.

    >>> round(deviation_of(90, 1000), 2), deviation_of(100, 40)
    (1.9, 7.5)
    """
    return max(2 * math.sqrt(top1 * (100 - top1) / images), 300 / images)


def table_rows(results: Json) -> list[list[str]]:
    rows = [["model", f"{task_in(results.get('qat', {})).title} %", "size", "agreement"]]
    for key, result in results_by_row(results).items():
        size = f"{result['size_bytes'] / 1e6:.1f} MB" if "size_bytes" in result else ""
        agreement = f"{100 * result['agreement']:.2f} %" if "agreement" in result else ""
        score = score_of(result)
        words, epochs, qat = ROWS[key], result.get("epochs"), results.get("qat", {})
        if key == "float_finetune" and epochs != qat.get("epochs"):  # a run that was extended
            words = f"float, fine-tuned {epochs} epochs"
        if key == "qat" and qat.get("epoch"):  # 0 without training
            words = f"{words}, {qat['weights']} epoch ({qat['epoch']} of {epochs})"
        rows.append([words, "" if score is None else f"{score:.2f}", size, agreement])
    return rows


def results_by_row(summary: Json) -> dict[str, Json]:
    nested = summary.get("onnx", {}).get("default_session")
    found = {**summary, "onnx.default_session": nested}
    return {key: found[key] for key in ROWS if found.get(key)}


def describe_choice(now: Json, before: Json) -> str:
    """Say which weights are exported, and which earlier export they replace.

    Both arguments are `qat` sections of summary.json; `before` is empty if nothing was exported.

    >>> three = {"weights": "last", "epoch": 3, "epochs": 3}
    >>> describe_choice(three, {})
    'epoch 3 of 3 (last)'
    >>> describe_choice(three, {"weights": "best", "epoch": 2, "epochs": 3})
    'epoch 3 of 3 (last) replaces epoch 2 of 3 (best) in model.onnx; export.weights=best brings that back'
    """
    new, old = ("epoch {epoch} of {epochs} ({weights})".format(**each) if each else "" for each in (now, before))
    if not before or new == old:
        return new
    back = f"; export.weights={before['weights']} brings that back" if now["epochs"] == before["epochs"] else ""
    return f"{new} replaces {old} in model.onnx{back}"
