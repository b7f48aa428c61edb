"""What preparing a model noted down: the layers that stay in float with the reason, and grids that were compromises."""

from torch import nn

LEFT_IN_FLOAT = "qat_left_in_float"
"""Attribute of a prepared model, and of each of its parts: layer name to the reason why it stays in float."""

COMPROMISES = "qat_compromises"
"""Attribute: quantizer name to the grid that another reader of its tensor had asked for."""

LAYERS = "qat_layers"
"""Attribute: all layers that a recipe could speak of, those in float included, name to float class."""

VERDICTS = "qat_self_checks"
"""Attribute: what `qat.fused.self_check.judging` found, by the state of the model that it looked at."""


def noted(model: nn.Module, key: str) -> dict[str, str]:
    """What was noted under a key for the model and for all parts in it, by full name."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        notes = vars(module).get(key, {})
        found |= {f"{prefix}.{name}" if prefix else name: note for name, note in notes.items()}
    return found
