"""docs/measurements.md's tables, from benchmarks/results/accuracy.jsonl and the models in benchmarks/models."""

import base64
import re
from typing import Any

import numpy as np

from benchmarks.accuracy import MODELS, kept
from benchmarks.accuracy_rows import ROWS, RULES, Row

TITLES = (
    "bits",
    "what",
    "epochs",
    "seeds",
    "calibrated",
    "QAT",
    "ONNX Runtime",
    "same answers",
    "QAT - float",
    "training loss",
)


def accuracy_table(own_float: bool = False) -> str:
    """Every row, also those that were not run; means over seeds, with the spread where there are several.

    Args:
        own_float: the rows of networks that train in float first, in place of those from ResNet-20's published weights.
    """
    lines = [f"| {' | '.join(TITLES)} |", f"|---|---|{'---:|' * (len(TITLES) - 2)}"]
    rows = {name: row for name, row in ROWS.items() if row.own_float == own_float and row.what not in RULES}
    results = [each for each in kept() if each["row"] in rows]
    for name, row in rows.items():
        own = [each for each in results if each["row"] == name]
        lines.append(f"| {' | '.join(_cells(row, own))} |")
    return "\n".join([*lines, "", *_floats(results), *_gains(own_float)]) + "\n"


def accuracy_in_short() -> str:
    """The README's table: the recipe of each width, from its first six epochs."""
    lines = [
        "| bits | float | calibrated | after 6 epochs of QAT | ONNX Runtime, integers |",
        "|---|---:|---:|---:|---:|",
    ]
    for bits in (8, 4, 3, 2):
        own = [each for each in kept() if each["row"] == f"resnet20_cifar10_w{bits}a{bits}"]
        cells = [f"{np.mean([each[stage] for each in own]):.1f} %" for stage in ("float", "calibrated", "qat", "onnx")]
        lines.append(f"| {bits} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _gains(own_float: bool) -> list[str]:
    """What rows have more than those beside them, image by image, on the seeds that both have."""
    gains = []
    for name, row in ROWS.items():
        if row.own_float == own_float and row.beside:
            own, other = (
                [each for each in kept() if each["row"] == which and "right" in each] for which in (name, row.beside)
            )
            if {each["seed"] for each in own} & {each["seed"] for each in other}:
                gain, error, seeds = gained(own, other)
                against = ROWS[row.beside].what.removeprefix("MobileNetV2, ")
                gains.append(f"| {row.bits} | {row.what} | {against} | {seeds} | {gain:+.2f} ± {error:.2f} |")
    if not gains:
        return []
    return ["", "| bits | row | beside | seeds | difference in points |", "|---:|---|---|---:|---:|", *gains]


def gained(rows: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[float, float, int]:
    """What rows have more than another's on the same images and seeds, its standard error, in points, and the seeds.

    With d the difference of an image, -1, 0 or 1, averaged over n seeds: mean(d); the error is that of the images,
    std(d) / sqrt(images), and of the seeds, std of their means / sqrt(n), in squares.
    """
    seeds = sorted({each["seed"] for each in rows} & {each["seed"] for each in other})
    first, second = (
        [_right(each) for seed in seeds for each in found if each["seed"] == seed] for found in (rows, other)
    )
    differences = np.stack(first).astype(float) - np.stack(second)
    images = differences.mean(axis=0).std() / np.sqrt(differences.shape[1])
    between = differences.mean(axis=1).std(ddof=1) / np.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
    return 100 * float(differences.mean()), 100 * float(np.hypot(images, between)), len(seeds)


def _right(result: dict[str, Any]) -> np.ndarray:
    """Which images a row answered rightly."""
    return np.unpackbits(np.frombuffer(base64.b64decode(result["right"]), np.uint8))


def rules_table() -> str:
    """The rules at 4, 3 and 2 bits on held-out images; the training loss behind the accuracy."""
    lines = ["| rule | 4 bits | 3 bits | 2 bits |", "|---|---|---|---|"]
    results = [each for each in kept() if ROWS[each["row"]].what in RULES]
    for rule in RULES:
        cells = []
        for bits in (4, 3, 2):
            names = {name for name, row in ROWS.items() if (row.what, row.bits) == (rule, bits)}
            own = [each for each in results if each["row"] in names]
            loss = f", loss {np.mean([each['train_loss'] for each in own]):.3f}" if own else ""
            cells.append(f"{_percent([each['qat'] for each in own])}{loss}" if own else "not run")
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_floats(results)]) + "\n"


def model_table() -> str:
    """The trained models that lie in benchmarks/models, with the accuracy of the run that they are from."""
    lines = ["| model | bits | top-1 on the 1,000 test images | ONNX file | weights |", "|---|---|---:|---:|---:|"]
    results = {each["row"]: each for each in reversed(kept()) if each["seed"] == 0}
    for path in sorted(MODELS.glob("*.onnx")):
        weights = path.with_suffix(".safetensors")
        sizes = " | ".join(f"{file.stat().st_size / 1000:,.0f} kB" for file in (path, weights))
        top1 = results[path.stem]["qat"]
        lines.append(f"| `{path.stem}` | {ROWS[path.stem].bits} | {top1:.1f} % | {sizes} |")
    return "\n".join(lines) + "\n"


def with_result(config: str, name: str) -> str:
    """A config of configs/ whose comment `# Result:` is that of its row, if it has one."""
    if name not in ROWS:
        return config
    return re.sub(r"^# Result: .*$", f"# Result: {_result_line(name)}", config, count=1, flags=re.MULTILINE)


def _result_line(name: str) -> str:
    own = [each for each in kept() if each["row"] == name]
    if not own:
        return "not run yet."
    seeds = f"{len(own)} seed{'s' * (len(own) > 1)}"
    last = own[-1]
    return (
        f"{_percent([each['qat'] for each in own])} top-1 ({last['float']:.1f} % in float; {seeds}), "
        f"{last['machine'].get('processor', 'CPU')}, {last['date']}, commit {last['commit']}; see docs/measurements.md."
    )


def _cells(row: Row, own: list[dict[str, Any]]) -> list[str]:
    start = [str(row.bits), row.what, str(row.epochs)]
    if not own:
        return [*start, "not run", *[""] * (len(TITLES) - 4)]
    difference = np.mean([each["difference"] for each in own])
    error = np.mean([each["standard_error"] for each in own])
    return [
        *start,
        str(len(own)),
        *(_percent([each[stage] for each in own]) for stage in ("calibrated", "qat", "onnx")),
        _percent([_share(each["agreement"]) for each in own]),
        f"{difference:+.1f} ± {error:.1f}",
        f"{np.mean([each['train_loss'] for each in own]):.3f}",
    ]


def _share(agreement: float | None) -> float | None:
    return None if agreement is None else 100 * agreement


def _percent(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    spread = f" ({min(known):.1f} to {max(known):.1f})" if len(known) > 1 else ""
    return f"{np.mean(known):.1f} %{spread}"


def _floats(results: list[dict[str, Any]]) -> list[str]:
    """What float has: as given, and after the same epochs; and where the last row was measured."""
    if not results:
        return []
    last = results[-1]
    floats = list(dict.fromkeys(_float_of(each) for each in results))
    for each in results:
        if each["float_finetune"] is not None:
            how = f"for {each['epochs']} epochs as the recipe of {ROWS[each['row']].bits} bits"
            floats.append(f"{each['float_finetune']:.1f} % fine-tuned {how}")
    machine, versions = last["machine"], last["versions"]
    return [
        f"Float: {'; '.join(floats)}.",
        "",
        f"torch {versions['torch']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)};"
        f" {machine.get('processor', 'CPU')}; last measured {last['date']} at {last['commit']}.",
    ]


def _float_of(result: dict[str, Any]) -> str:
    row = ROWS[result["row"]]
    if not row.own_float:
        return f"{result['float']:.1f} % as published"
    return f"{row.what.partition(',')[0]} {result['float']:.1f} %"
