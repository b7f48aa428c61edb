"""README's first table: what post-training quantization loses at 8, 4 and 2 bits, and what an epoch of QAT recovers.

benchmarks/resnet20_cifar10_w8a8.yaml and benchmarks/resnet20_cifar10_w4a4.yaml hold the commands of the runs;
`python -m benchmarks.document runs/NAME/summary.json ...` keeps their summaries, from which the table is made.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

RUNS = {
    "resnet20_cifar10_w8a8": "8 bits",
    "resnet20_cifar10_w4a4": "4 bits",
    "resnet20_cifar10_w2a2": "2 bits",
}
"""Kept run: the bits of its weights and activations; below 8 the first and the last layer have 8."""

STAGES = {
    "float": "float",
    "calibrated": "calibrated (PTQ)",
    "qat": "after one epoch of QAT",
    "onnx": "ONNX Runtime, integers",
}


def low_bit_table() -> str:
    """One row a run that is kept: percent of the validation images, and below it what was run."""
    runs = {bits: found for name, bits in RUNS.items() if (found := _kept(name)) is not None}
    titles = ("weights and activations", *STAGES.values())
    lines = [f"| {' | '.join(titles)} |", f"|---|{'---:|' * len(STAGES)}"]
    for bits, found in runs.items():
        cells = [f"{found[stage]['top1']:.1f} %" for stage in STAGES]
        lines.append(f"| {' | '.join((bits, *cells))} |")
    for bits, found in runs.items():
        if "float_finetune" in found:
            top1 = found["float_finetune"]["top1"]
            lines += ["", f"The float weights after the same epoch as with {bits}: {top1:.1f} %."]
    threads: dict[str, list[str]] = {}
    for bits, found in runs.items():
        threads.setdefault(_conditions(found), []).append(bits)
    lines += ["", "; ".join(f"{' and '.join(bits)}: {what}" for what, bits in threads.items()) + "."]
    return "\n".join(lines) + "\n"


def _conditions(found: dict[str, Any]) -> str:
    """On what a run was made."""
    machine, torch = found["machine"], found["versions"]["torch"]
    return f"{machine['processor']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}, torch {torch}"


def _kept(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
