"""From the `quantization` section of a config to the library's `QuantRecipe`."""

from dataclasses import replace
from typing import Any

from torch import fx, nn

import qat
from qat.quantizer import registered_quantizers
from qat.spec import QuantRecipe, default_activation_spec, default_weight_spec
from qat.training.config import QuantizationConfig, RunConfig, SpecConfig
from qat.training.errors import UserError

MOST_EXPORTED_BITS = 8


def build_recipe(config: QuantizationConfig) -> QuantRecipe:
    """The recipe; fields that the config leaves out keep the target's choice.

    Raises:
        UserError: for combinations that the library refuses.
    """
    try:
        return QuantRecipe(
            weight=replace(default_weight_spec(), **_given(config.weight)),
            activation=replace(default_activation_spec(), **_given(config.activation)),
            overrides={
                pattern: {
                    "weight": _given(override.weight),
                    "activation": _given(override.activation),
                    **({"skip": True} if override.skip else {}),
                }
                for pattern, override in config.overrides.items()
            },
            target=config.target,
        )
    except ValueError as error:
        raise UserError(f"quantization: {error}") from error


def prepare_model(model: nn.Module, config: RunConfig) -> fx.GraphModule:
    """`qat.prepare` with the config's recipe; called before the float training too, so that mistakes show at once.

    Raises:
        UserError: if the model cannot be prepared, or not exported although the config asks for it.
    """
    recipe = build_recipe(config.quantization)
    rules = {"weight": recipe.weight.rule, "activation": recipe.activation.rule}
    for tensor, rule in rules.items():
        if rule not in registered_quantizers():
            names = ", ".join(registered_quantizers())
            raise UserError(f"quantization.{tensor}.rule: unknown quantizer {rule!r}; registered: {names}")
    try:
        prepared = qat.prepare(model, recipe)
    except ValueError as error:
        raise UserError(f"quantization: {error}") from error
    if config.export.onnx:
        for name, module in prepared.named_modules():
            if isinstance(module, qat.Quantizer) and module.spec.bits > MOST_EXPORTED_BITS:
                raise UserError(
                    f"quantization: {name} has {module.spec.bits} bits, and ONNX Runtime's integer kernels take at most"
                    f" {MOST_EXPORTED_BITS}; use fewer, or set export.onnx=false"
                )
    return prepared


def _given(spec: SpecConfig) -> dict[str, Any]:
    """The fields that the config sets."""
    return spec.model_dump(exclude_none=True)
