"""`cost`: the computation of each layer for one image, and the size of its weight."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from qat.contexts import evaluating, first_calls, warnings_ignored
from qat.inputs import Inputs, bind_inputs, call_with, expect_model
from qat.layers import QuantFunction, QuantLayer
from qat.quantizer import Quantizer
from qat.switches import named_quantizers

FLOAT_BITS = 32
BETWEEN = "(between layers)"
"""Name of the row for all products outside of layers, such as attention's two."""


class LayerCost(NamedTuple):
    """The cost of a layer: macs, bits of operands (32 in float), bytes of its weight."""

    name: str
    macs: int
    weight_bits: int
    activation_bits: int
    weight_bytes: int

    @property
    def bops(self) -> int:
        """Bit operations, macs * weight_bits * activation_bits."""
        return self.macs * self.weight_bits * self.activation_bits


def cost(model: nn.Module, example_inputs: Inputs) -> list[LayerCost]:
    """Count the products of each layer for example inputs, and its weight's bytes.

        bops = macs * weight_bits * activation_bits

    as Bayesian Bits counts bit operations (arXiv:2005.07093). Macs are torch's count of convolutions and products of
    matrices, halved.

    Args:
        model: from `prepare`, or a float model; it is left as it was.
        example_inputs: as of `prepare`; a batch of one image for the cost of an image.

    Returns:
        A row for each quantized layer and each float one that multiplies, as they run. weight_bytes are without bias.
        The last row may be for products outside of layers, which are taken to lie on the widest grid of the model's
        activations.

    Raises:
        ValueError: if the inputs do not fit the model's call.

    >>> import qat
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 4)), qat.QuantRecipe(weight={"bits": 4}), torch.zeros(1, 8))
    >>> [row] = cost(model, torch.zeros(1, 8))
    >>> row.name, row.macs, row.bops, row.weight_bytes
    ('0', 32, 1024, 16)
    """
    expect_model(cost, model)
    call, counter = bind_inputs("cost", model, example_inputs), FlopCounterMode(display=False)
    layers = [each for each in model.modules() if isinstance(each, QuantLayer) or not any(each.children())]
    grad = torch.enable_grad()  # without grad mode, FlopCounterMode fails on views of weights
    with counter, first_calls(layers) as calls, evaluating(model), grad, warnings_ignored("a quantizer "):
        call_with(model, call)
    names: dict[nn.Module, list[str]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        names.setdefault(layer, []).append(name)
    owned = {name: quantizers for name, _, quantizers in named_quantizers(model)}
    rows = []
    for layer, (args, kwargs) in calls.items():
        name, *_ = known = names[layer]
        # torch counts under one of the names of a shared layer.
        counts = (counter.flop_counts.get(".".join(filter(None, (type(model).__name__, each))), {}) for each in known)
        macs = sum(sum(each.values()) for each in counts) // 2
        if macs or isinstance(layer, QuantLayer):
            bits, activation = (_width(owned.get(name, []), role) for role in ("weight", "activation"))
            weight = (
                [*args, *kwargs.values()][1] if isinstance(layer, QuantFunction) else getattr(layer, "weight", None)
            )
            size = -(-weight.numel() * bits // 8) if isinstance(weight, Tensor) else 0
            rows.append(LayerCost(name, macs, bits, activation, size))
    between = counter.get_total_flops() // 2 - sum(row.macs for row in rows)
    if between:
        bits = _width([each for each in model.modules() if isinstance(each, Quantizer)], "activation")
        rows.append(LayerCost(BETWEEN, between, bits, bits, 0))
    return rows


def _width(quantizers: list[Quantizer], role: str) -> int:
    widths = (FLOAT_BITS if each.is_disabled else each.spec.bits for each in quantizers if each.role == role)
    return max(widths, default=FLOAT_BITS)
