"""Notes that preparation leaves on a model: the layers that stay in float and why, and compromises between grids."""

from torch import nn

LEFT_IN_FLOAT = "qat_left_in_float"
"""Attribute of a prepared model and of each of its parts: layer name to the reason why it stays in float."""

WHOLE_MODEL = "(the model)"
"""What `LEFT_IN_FLOAT` calls a model that is prepared in parts; its reason begins with "prepared in parts"."""

COMPROMISES = "qat_compromises"
"""Attribute: quantizer name to the grid that another consumer of its tensor had asked for."""

LAYERS = "qat_layers"
"""Attribute: all layers that a recipe could name, those in float included, name to float class."""

PROFILE = "qat_target"
"""Attribute of a traced part: the `TargetProfile` that its grids are for."""

VERDICTS = "qat_self_checks"
"""Attribute of a traced part: what its self-checks found (`qat.codes`), by the model's state; the latest is last."""


def noted(model: nn.Module, key: str) -> dict[str, str]:
    """The notes under a key, of the model and all its parts, by full name."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        notes = vars(module).get(key, {})
        found |= {f"{prefix}.{name}" if prefix else name: note for name, note in notes.items()}
    return found
