"""The table of docs/rules.md: what every registered rule takes, found by asking the rules, not typed."""

import itertools
import re
from dataclasses import fields

from qat.quantizer import Quantizer, create_quantizer, registered_quantizers
from qat.quantizer.registry import quantizer_class
from qat.spec import QuantSpec

ROLES = ("weight", "activation")
GRIDS = {"signed": (True, True), "unsigned": (False, True), "signed affine": (True, False), "affine": (False, False)}


def accepted(rule: str) -> dict[str, list[Quantizer]]:
    """Role to the quantizers of this rule that can be made, over all bits and grids."""
    found: dict[str, list[Quantizer]] = {role: [] for role in ROLES}
    for role, bits, (signed, symmetric) in itertools.product(ROLES, range(1, 17), GRIDS.values()):
        try:
            found[role].append(create_quantizer(QuantSpec(bits, signed, symmetric, rule=rule), role))
        except ValueError:
            continue
    return found


def bits_of(quantizers: list[Quantizer]) -> str:
    """`2 to 8`, `1`, or `no` if the rule is not for this."""
    bits = sorted({quantizer.spec.bits for quantizer in quantizers})
    return "no" if not bits else str(bits[0]) if len(bits) == 1 else f"{bits[0]} to {bits[-1]}"


def grids_of(quantizers: list[Quantizer]) -> str:
    """The kinds of grids, in words."""
    kinds = {(quantizer.spec.signed, quantizer.spec.symmetric) for quantizer in quantizers}
    return "any" if len(kinds) == len(GRIDS) else ", ".join(name for name, kind in GRIDS.items() if kind in kinds)


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
    lines = ["| rule | what it is | weights: bits | activations: bits | grids | exports | options |", "|---" * 7 + "|"]
    for rule in registered_quantizers():
        if quantizer_class(rule).__module__.startswith("qat."):
            found = accepted(rule)
            everything = [quantizer for quantizers in found.values() for quantizer in quantizers]
            summary = (quantizer_class(rule).__doc__ or "").split("\n")[0].rstrip(".")
            summary = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", summary)
            cells = (
                f"`{rule}`", summary, bits_of(found["weight"]), bits_of(found["activation"]), grids_of(everything),
                exports(found), options_of(rule),
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
