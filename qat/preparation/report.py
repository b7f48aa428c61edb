"""Notes that preparation leaves on a model."""

from torch import nn

LEFT_IN_FLOAT = "qat_left_in_float"
"""Attribute of a prepared model and its parts: layer in float to the reason why."""

WHOLE_MODEL = "(the model)"
"""Name in `LEFT_IN_FLOAT` of a model that is "prepared in parts, since ..."."""

COMPROMISES = "qat_compromises"
"""Attribute: quantizer to the grid that another consumer of its tensor asked for."""

LAYERS = "qat_layers"
"""Attribute: all layers that a recipe could name, name to float class."""

PROFILE = "qat_target"
"""Attribute of a traced part: the `TargetProfile` that its grids are for."""

VERDICTS = "qat_self_checks"
"""Attribute of a traced part: its self-checks by state, the latest last."""


def notes_of(model: nn.Module, key: str) -> dict[str, str]:
    """Return the notes under a key, of the model and all its parts, by full name."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        notes = vars(module).get(key, {})
        found |= {f"{prefix}.{name}" if prefix else name: note for name, note in notes.items()}
    return found
