"""docs/measurements.md's tables, from benchmarks/results/accuracy.jsonl and the models in benchmarks/models."""

import re
from typing import Any

import numpy as np

from benchmarks.accuracy import ACCURACY, MODELS
from benchmarks.kept import kept, table

Result = dict[str, Any]


def results() -> list[Result]:
    """The kept lines."""
    return kept(ACCURACY)


def accuracy_table(own_float: bool = False) -> str:
    """Every row that was run; means over seeds, with the spread where there are several.

    Args:
        own_float: the rows of networks that train in float first, in place of those from ResNet-20's published weights.
    """
    titles = (
        "bits", "what", "epochs", "seeds", "calibrated", "QAT", "ONNX Runtime", "same answers", "QAT - float",
        "training loss",
    )  # fmt: skip
    found = [each for each in results() if each.get("own_float", False) == own_float]
    names = sorted({each["row"]: each["bits"] for each in found}.items(), key=lambda pair: (-pair[1], pair[0]))
    rows = {name: [each for each in found if each["row"] == name] for name, _ in names}
    return f"{table(titles, map(_cells, rows.values()), 2)}\n{_floats(found)}\n{_gains(rows)}"


def accuracy_in_short() -> str:
    """The README's table: the recipe of each width, from its first six epochs."""
    rows = []
    for bits in (8, 4, 3, 2):
        own = [each for each in results() if each["row"] == f"resnet20_cifar10_w{bits}a{bits}"]
        cells = [f"{np.mean([each[stage] for each in own]):.1f} %" for stage in ("float", "calibrated", "qat", "onnx")]
        rows.append([str(bits), *cells])
    return table(("bits", "float", "calibrated", "after 6 epochs of QAT", "ONNX Runtime, integers"), rows, 1)


def model_table() -> str:
    """The trained models that lie in benchmarks/models, with the accuracy of the run that they are from."""
    rows = []
    of_seed_0 = {each["row"]: each for each in reversed(results()) if each["seed"] == 0}
    for path in sorted(MODELS.glob("*.onnx")):
        sizes = [f"{file.stat().st_size / 1000:,.0f} kB" for file in (path, path.with_suffix(".safetensors"))]
        own = of_seed_0[path.stem]
        rows.append([f"`{path.stem}`", str(own["bits"]), f"{own['qat']:.1f} %", *sizes])
    return table(("model", "bits", "top-1 on the 1,000 test images", "ONNX file", "weights"), rows, 2)


def with_result(config: str, name: str) -> str:
    """A config of configs/ whose comment `# Result:` is that of its row, if it has one."""
    own = [each for each in results() if each["row"] == name]
    if not own:
        return config
    last, seeds = own[-1], f"{len(own)} seed{'s' * (len(own) > 1)}"
    said = (
        f"{_percent([each['qat'] for each in own])} top-1 ({last['float']:.1f} % in float; {seeds}), "
        f"{last['machine'].get('processor', 'CPU')}, {last['date']}, commit {last['commit']}; see docs/measurements.md."
    )
    return re.sub(r"^# Result: .*$", f"# Result: {said}", config, count=1, flags=re.MULTILINE)


def _gains(rows: dict[str, list[Result]]) -> str:
    """What rows have more than those beside them, in points, as they were compared image by image."""
    gains = []
    for own in rows.values():
        if "gain" in own[0]:
            gain, error = own[0]["gain"]
            gains.append([str(own[0]["bits"]), own[0]["what"], own[0]["beside"], f"{gain:+.2f} ± {error:.2f}"])
    return "\n" + table(("bits", "row", "beside", "difference in points"), gains, 3) if gains else ""


def _cells(own: list[Result]) -> list[str]:
    agreements = [None if each["agreement"] is None else 100 * each["agreement"] for each in own]
    difference, error, loss = (
        np.mean([each[key] for each in own]) for key in ("difference", "standard_error", "train_loss")
    )
    return [
        str(own[0]["bits"]), own[0]["what"], str(own[0]["epochs"]), str(len(own)),
        *(_percent([each[stage] for each in own]) for stage in ("calibrated", "qat", "onnx")),
        _percent(agreements), f"{difference:+.1f} ± {error:.1f}", f"{loss:.3f}",
    ]  # fmt: skip


def _percent(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    spread = f" ({min(known):.1f} to {max(known):.1f})" if len(known) > 1 else ""
    return f"{np.mean(known):.1f} %{spread}"


def _floats(found: list[Result]) -> str:
    """What float has: as given, and after the same epochs; and where the last row was measured."""
    floats = [
        f"{each['what'].partition(',')[0]} {each['float']:.1f} %" if each.get("own_float")
        else f"{each['float']:.1f} % as published"
        for each in found
    ]  # fmt: skip
    floats = list(dict.fromkeys(floats))
    for each in found:
        if each["float_finetune"] is not None:
            how = f"for {each['epochs']} epochs as the recipe of {each['bits']} bits"
            floats.append(f"{each['float_finetune']:.1f} % fine-tuned {how}")
    last = found[-1]
    machine = last["machine"]
    return (
        f"Float: {'; '.join(floats)}.\n\ntorch {last['versions']['torch']}, {machine['threads']}"
        f" thread{'s' * (machine['threads'] > 1)}; {machine.get('processor', 'CPU')};"
        f" last measured {last['date']} at {last['commit']}."
    )
