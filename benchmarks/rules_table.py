"""The table of docs/rules.md: what every registered rule takes, found by asking the rules, not typed."""

import itertools
import re
from dataclasses import fields

from qat.quantizer import Quantizer, create_quantizer, registered_quantizers
from qat.quantizer.registry import quantizer_class
from qat.spec import QuantSpec, Role, default_spec

ROLES: tuple[Role, ...] = ("weight", "activation")
GRIDS = {"signed": (True, True), "unsigned": (False, True), "signed affine": (True, False), "affine": (False, False)}


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
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for rule in registered_quantizers():
        if quantizer_class(rule).__module__.startswith("qat."):
            found = accepted(rule)
            sections = "<br>".join(section for role in ROLES if (section := in_yaml(rule, role)) != "no")
            summary = (quantizer_class(rule).__doc__ or "").split("\n")[0].rstrip(".")
            summary = summary.replace("|", "\\|")
            summary = re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", summary)
            cells = (
                f"`{rule}`", summary, bits_of(found["weight"]), bits_of(found["activation"]), sections,
                exports(found), options_of(rule),
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
