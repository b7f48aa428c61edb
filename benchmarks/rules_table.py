"""docs/rules.md's tables: what every registered rule takes and learns, and what it does to a trained model."""

import itertools
import json
import re
from dataclasses import fields

from benchmarks.kept import RESULTS, table
from qat.quantizer import Quantizer, create_quantizer, registered_quantizers
from qat.quantizer.registry import quantizer_class
from qat.spec import QuantSpec, Role, default_spec

ROLES: tuple[Role, ...] = ("weight", "activation")
GRIDS = {"signed": (True, True), "unsigned": (False, True), "signed affine": (True, False), "affine": (False, False)}

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


def accepted(rule: str) -> dict[str, list[Quantizer]]:
    """Role to the quantizers of this rule that can be made, over all bits and grids."""
    found: dict[str, list[Quantizer]] = {role: [] for role in ROLES}
    for role, bits, (signed, symmetric) in itertools.product(ROLES, range(1, 17), GRIDS.values()):
        if role == "weight" and not symmetric:
            continue  # a recipe refuses it: no exact BatchNorm folding
        try:
            found[role].append(create_quantizer(QuantSpec(bits, signed, symmetric, "tensor", rule), role))
        except ValueError:
            continue
    return found


def bits_of(quantizers: list[Quantizer]) -> str:
    """`2 to 8`, `1`, or `no` if the rule is not for this."""
    bits = sorted({quantizer.spec.bits for quantizer in quantizers})
    return "no" if not bits else str(bits[0]) if len(bits) == 1 else f"{bits[0]} to {bits[-1]}"


def in_yaml(rule: str, role: Role) -> str:
    """The shortest section that works from the defaults of `role`, as it stands under `quantization:`."""
    default = default_spec(role)
    choices = {
        "bits": (8, 4, 2, 1, 6),
        "signed": (default.signed, not default.signed),
        "symmetric": (default.symmetric, True),
        "granularity": (default.granularity, "tensor"),
    }
    found: list[dict[str, object]] = []
    for values in itertools.product(*choices.values()):
        change = {key: value for key, value in zip(choices, values, strict=True) if value != getattr(default, key)}
        try:
            create_quantizer(default.changed({"rule": rule, **change}), role)
            found.append(change)
        except ValueError:
            continue
    if not found:
        return "no"
    words = {"rule": rule, **min(found, key=len)}
    inner = ", ".join(
        f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in words.items()
    )
    return f"`{role}: {{{inner}}}`"


def exports(found: dict[str, list[Quantizer]]) -> str:
    """What the ONNX file can hold in integers."""
    roles = [f"{role}s" for role in ROLES if any(quantizer.exportable for quantizer in found[role])]
    return " and ".join(roles) or "no"


def options_of(rule: str) -> str:
    """The options with their defaults."""
    taken = fields(quantizer_class(rule).options_type)
    return ", ".join(f"`{option.name}={option.default!r}`" for option in taken)


def rules_table() -> str:
    """All rules in Markdown."""
    titles = ("rule", "what it is", "bits of weights", "of activations", "in YAML", "exports", "options")
    rows = []
    for rule in registered_quantizers():
        if quantizer_class(rule).__module__.startswith("qat."):
            found = accepted(rule)
            sections = "<br>".join(section for role in ROLES if (section := in_yaml(rule, role)) != "no")
            summary = (quantizer_class(rule).__doc__ or "").split("\n")[0].rstrip(".")
            summary = summary.replace("|", "\\|")
            summary = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", summary)
            rows.append((
                f"`{rule}`", summary, bits_of(found["weight"]), bits_of(found["activation"]), sections,
                exports(found), options_of(rule),
            ))  # fmt: skip
    return table(titles, rows)


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
