"""docs/worth_it.md's tables: what calibration, steps without labels and training give, from what is kept of each."""

from typing import Any

import numpy as np

from benchmarks.accuracy_table import gained
from benchmarks.accuracy_table import results as trained
from benchmarks.kept import RESULTS, kept, table

POST_TRAINING = RESULTS / "post_training.jsonl"
PLAIN = "calibration alone"

Result = dict[str, Any]


def post_training_table() -> str:
    """A line for each width and step: top-1, and what it gives beside calibration alone on the same images."""
    titles = (
        "bits", "steps", "seeds", "top-1", "against calibration alone", "against float", "ONNX", "same answers",
        "seconds",
    )  # fmt: skip
    rows, found = by_step(), kept(POST_TRAINING)
    machines = dict(zip(dict.fromkeys(map(_machine, found)), "abcdef", strict=False))
    lines = [
        [*name.split(": "), *_cells(own, rows[f"{name.partition(': ')[0]}: {PLAIN}"], machines)]
        for name, own in rows.items()
    ]
    said = "\n".join(f"({letter}) {machine}." for machine, letter in machines.items())
    return f"{table(titles, lines, 2)}\nFloat: {found[0]['float']:.1f} %.\n{said}\n"


def worth_table() -> str:
    """For each width: calibration alone, the best post-training step, and QAT, with what each costs."""
    rows = []
    for bits in (4, 3, 2):
        grid = f"W{bits}A{bits}: "
        steps = {name.removeprefix(grid): own for name, own in by_step().items() if name.startswith(grid)}
        best = max(steps, key=lambda step: _mean(steps[step], "top1"))
        recipe = f"resnet20_cifar10_w{bits}a{bits}"
        rows.append([
            grid.rstrip(": "), f"{_mean(steps[PLAIN], 'top1'):.1f} %",
            f"{_mean(steps[best], 'top1'):.1f} %, {best}, {_mean(steps[best], 'seconds'):.0f} s",
            _trained(f"{recipe}_short"), _trained(recipe),
        ])  # fmt: skip
    titles = (
        "bits", PLAIN, "best post-training step", "QAT, 2 epochs, plain", "QAT, 6 epochs, our recipe",
    )  # fmt: skip
    return table(titles, rows, 1)


def by_step() -> dict[str, list[Result]]:
    """The kept results of each width and step, such as "W4A4: QDrop", over the seeds."""
    found: dict[str, list[Result]] = {}
    for each in kept(POST_TRAINING):
        found.setdefault(each["row"], []).append(each)
    return found


def _trained(name: str) -> str:
    """What a row of benchmarks.accuracy ends with, and the minutes that it takes."""
    rows = [each for each in trained() if each["row"] == name]
    seconds = np.median([each["seconds"] for each in rows])  # resumed runs count too little, disturbed ones too much
    return f"{_mean(rows, 'qat'):.1f} %, {seconds / 60:.0f} min"


def _cells(own: list[Result], plain: list[Result], machines: dict[str, str]) -> list[str]:
    gain, error, _ = gained(own, plain)
    where = ", ".join(sorted({machines[_machine(each)] for each in own}))
    return [
        str(len(own)), f"{_mean(own, 'top1'):.1f} %", f"{gain:+.1f} ± {error:.1f}" if gain else "",
        f"{_mean(own, 'difference'):+.1f} ± {_mean(own, 'standard_error'):.1f}", f"{_mean(own, 'onnx'):.1f} %",
        f"{100 * _mean(own, 'agreement'):.1f} %", f"{_mean(own, 'seconds'):.0f} ({where})",
    ]  # fmt: skip


def _mean(rows: list[Result], key: str) -> float:
    return float(np.mean([each[key] for each in rows]))


def _machine(result: Result) -> str:
    """Where a row was measured, beside whose seconds it stands."""
    machine = result["machine"]
    return f"{machine['processor']}, {machine['threads']} thread, torch {result['versions']['torch']}"
