"""What was measured of the rules: calibrated models for docs/rules.md, short runs for docs/measurements.md."""

import json
from typing import Any

import numpy as np

from benchmarks.kept import RESULTS, kept, table
from benchmarks.rules_table import ROLES, accepted

FOR = {
    "apot": "weights in a bell: levels close together near 0; for hardware that shifts",
    "binary": "weights of one bit",
    "dorefa": "few bits without a learned range; activations above 1 are cut off, so it needs training behind",
    "dsq": "few bits, where a softer gradient helps; three times the time of `lsq`",
    "ema": "8 bits in the classic way; a range that outliers of one batch do not set",
    "fp8_e4m3": "to try what a GPU's fp8 would do; finer steps, less range",
    "fp8_e5m2": "the same; coarser steps, more range",
    "learned_bits": "to find how many bits each tensor needs",
    "lsq": "the default: any bits",
    "lsq_plus": "activations that are negative in part (swish, GELU) at few bits",
    "minmax": "8 bits, or a range that nothing learns",
    "mxfp4": "to try what accelerators of the MX formats would do",
    "mxfp6": "the same",
    "mxfp8": "the same",
    "mxint8": "the same",
    "n2uq": "few bits: levels that are unevenly far apart on the way in",
    "pact": "activations behind a ReLU at few bits",
    "power_of_two": "hardware that scales by shifts",
    "stacked_sigmoid": "a long training that hardens step by step",
    "ternary": "weights -1, 0, 1 with one scale, which the weights give",
    "ttq": "weights of three levels with two learned scales",
}
"""What a rule is for, in one line."""


def calibrated_table() -> str:
    """The rules in Markdown, with what they do to a trained model before any training."""
    found = json.loads((RESULTS / "calibrated_rules.json").read_text())
    cells: dict[tuple[str, str, bool], str] = {}
    for row in found["rows"]:
        own = f", {row['bits']} bit{'s' * (row['bits'] > 1)}" if row["bits"] not in (8, 4) else ""
        cells[row["rule"], row["role"], row["bits"] > 4] = f"{row['top1']:.1f} ({100 * row['error']:.0f} %{own})"
    titles = ("rule", "what it is for", "weights at 8 bits", "at 4", "activations at 8 bits", "at 4", "learns")
    rows = []
    for rule, use in FOR.items():
        measured = [cells.get((rule, role, many), "") for role in ROLES for many in (True, False)]
        rows.append([f"`{rule}`", use, *measured, learned(rule)])
    return table(titles, rows) + (
        f"\nResNet-20 on CIFAR-10 from published weights, float {found['float']:.1f} %: top-1 on {found['images']} test"
        " images (differences below 3 points say nothing), in brackets the error of the logits, |y - float| / |float|."
        " The rule is on the weights or the activations of all layers but the first and the last, `lsq` at 8 bits on"
        f" all else; calibrated on {found['calibration']} images, not trained; torch"
        f" {found['torch']}, commit d444f1a.\n"
    )


def learned(rule: str) -> str:
    """What the rule learns, over both roles, and the factor on the rate of what does not have that of its bits."""
    found = [each for quantizers in accepted(rule).values() for each in quantizers]
    names = sorted({name for each in found for name, _ in each.named_parameters()})
    factors = found[0].lr_factors
    return (
        ", ".join(f"`{name}`" + (f" ({factors[name]:g} lr)" if name in factors else "") for name in names) or "nothing"
    )


def short_runs_table(bits: int) -> str:
    """The rules at these bits, each trained alike for some steps: means over the seeds, with the spread."""
    found = [row for row in kept(RESULTS / "default_rule.jsonl") if row["bits"] == bits]
    titles = (
        "rule", "seeds", "calibrated top-1 %", "QAT top-1 %", "training loss, last 20 steps", "scales on their floor",
    )  # fmt: skip
    rows = []
    for rule in dict.fromkeys(row["rule"] for row in found):
        own = [row for row in found if row["rule"] == rule]
        digits = {"calibrated": 1, "qat": 1, "loss": 3, "scales_on_floor": 0}
        rows.append([rule, str(len(own)), *(_spread([row[key] for row in own], digits[key]) for key in digits)])
    first: dict[str, Any] = found[0]
    return table(titles, rows) + (
        f"\n{first['steps']} steps of 128 images, SGD with momentum 0.9, lr {first['lr']:g} and cosine; torch"
        f" {first['versions']['torch']}, Python {first['versions']['python']}, {first['machine']['threads']} thread.\n"
    )


def _spread(values: list[float], digits: int) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"
