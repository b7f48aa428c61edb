"""docs/worth_it.md's tables: what calibration, steps without labels and training give, from what is kept of each."""

from typing import Any

import numpy as np

from benchmarks.accuracy_table import results as trained
from benchmarks.kept import RESULTS, kept, table

POST_TRAINING = RESULTS / "post_training.jsonl"
PLAIN = "calibration alone"


def post_training_table() -> str:
    """A line for each width and step: top-1, and what it gives beside calibration alone on the same images."""
    found = kept(POST_TRAINING)
    machines = dict(zip(dict.fromkeys(map(_machine, found)), "abcdef", strict=False))
    lines = []
    for each in found:
        gain, error = each["gain"]
        lines.append([
            *each["row"].split(": "), f"{each['top1']:.1f} %", f"{gain:+.1f} ± {error:.1f}" if gain else "",
            f"{each['difference']:+.1f} ± {each['standard_error']:.1f}", f"{each['onnx']:.1f} %",
            f"{100 * each['agreement']:.1f} %", f"{each['seconds']:.0f} ({machines[_machine(each)]})",
        ])  # fmt: skip
    titles = ("bits", "steps", "top-1", f"against {PLAIN}", "against float", "ONNX", "same answers", "seconds")
    said = "\n".join(f"({letter}) {machine}." for machine, letter in machines.items())
    return f"{table(titles, lines, 2)}\nFloat: {found[0]['float']:.1f} %.\n{said}\n"


def worth_table() -> str:
    """For each width: calibration alone, the best post-training step, and QAT, with what each costs."""
    rows = []
    for bits in (4, 3, 2):
        grid, recipe = f"W{bits}A{bits}", f"resnet20_cifar10_w{bits}a{bits}"
        steps = [each for each in kept(POST_TRAINING) if each["row"].startswith(grid)]
        plain = next(each for each in steps if each["row"] == f"{grid}: {PLAIN}")
        best = max(steps, key=lambda each: each["top1"])
        said = f"{best['top1']:.1f} %, {best['row'].partition(': ')[2]}, {best['seconds']:.0f} s"
        rows.append([grid, f"{plain['top1']:.1f} %", said, _trained(f"{recipe}_short"), _trained(recipe)])
    titles = ("bits", PLAIN, "best post-training step", "QAT, 2 epochs, plain", "QAT, 6 epochs, our recipe")
    return table(titles, rows, 1)


def _trained(name: str) -> str:
    """What a row of benchmarks.accuracy ends with, and the minutes that it takes."""
    rows = [each for each in trained() if each["row"] == name]
    seconds = np.median([each["seconds"] for each in rows])  # resumed runs count too little, disturbed ones too much
    return f"{np.mean([each['qat'] for each in rows]):.1f} %, {seconds / 60:.0f} min"


def _machine(result: dict[str, Any]) -> str:
    """Where a row was measured, beside whose seconds it stands."""
    machine = result["machine"]
    return f"{machine['processor']}, {machine['threads']} thread, torch {result['versions']['torch']}"
