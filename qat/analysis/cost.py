"""`cost`: what each layer of a prepared model computes for one image, and what its weight takes."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from qat.analysis.table import graphs_of
from qat.contexts import evaluating, warnings_ignored
from qat.inputs import bind_inputs, call_with, expect_model
from qat.layers import QuantLayer
from qat.preparation.operations import grid_of, is_product
from qat.quantizer import Quantizer
from qat.switches import named_quantizers
from qat.torch_internals import TorchDispatchMode
from qat.tracing.nodes import submodule_of

FLOAT_BITS = 32
BETWEEN = "(products of activations)"
"""The name of the row of all that no layer multiplies, such as attention's two products."""


class LayerCost(NamedTuple):
    """The cost of a layer: multiplications and additions, bits of its operands (32 in float), bytes of its weight."""

    name: str
    macs: int
    weight_bits: int
    activation_bits: int
    weight_bytes: int

    @property
    def bops(self) -> int:
        """Bit operations, macs * weight_bits * activation_bits."""
        return self.macs * self.weight_bits * self.activation_bits


def cost(model: nn.Module, example_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> list[LayerCost]:
    """What each layer of a model multiplies for example inputs, in bits too, and the bytes of its weight.

        bops = macs * weight_bits * activation_bits

    as Bayesian Bits counts bit operations (arXiv:2005.07093; UNIQ, arXiv:1804.10969, adds those of the accumulator).
    Macs are those of convolutions and products of matrices. Float has 32 bits. weight_bytes holds the weight at its
    bits, and 4 bytes for each bias, of the layer or of the BatchNorm that it folds.

    Args:
        model: from `prepare`, or a float model; it is left as it was.
        example_inputs: as of `prepare`; a batch of one image for the cost of an image.

    Returns:
        A row for each quantized layer that runs, and each float layer that multiplies, in the order in which they run.
        The last one may be the sum of all products of activations, on the widest of their grids.

    Raises:
        ValueError: if the inputs do not fit the model's call.

    >>> import qat
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 4)), qat.QuantRecipe(weight={"bits": 4}))
    >>> [row] = cost(model, torch.zeros(1, 8))
    >>> row.name, row.macs, row.bops, row.weight_bytes
    ('0', 32, 1024, 32)
    """
    expect_model(cost, model)
    call, counter = bind_inputs("cost", model, example_inputs), _Macs()  # type: ignore[no-untyped-call]
    found: dict[nn.Module, list[int]] = {}

    def enter(layer: nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault(layer, [0, _weight_bytes(layer, args, kwargs)])[0] -= counter.macs

    def leave(layer: nn.Module, args: Any, output: Any) -> None:
        found[layer][0] += counter.macs

    with counter, ExitStack() as hooks, evaluating(model), torch.no_grad(), warnings_ignored("a quantizer "):
        for layer in model.modules():
            if isinstance(layer, QuantLayer) or not any(layer.children()):
                hooks.enter_context(layer.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(layer.register_forward_hook(leave))
        call_with(model, call)
    names = {layer: name for name, layer in model.named_modules()}
    owned = {name: quantizers for name, _, quantizers in named_quantizers(model)}
    rows = []
    for layer, (macs, size) in found.items():
        if macs or isinstance(layer, QuantLayer):
            weight, activation = (_width(owned.get(names[layer], []), role) for role in ("weight", "activation"))
            rows.append(LayerCost(names[layer], macs, weight, activation, size))
    between = counter.macs - sum(row.macs for row in rows)
    if between:
        wide = _width(_multiplied(model), "activation")
        rows.append(LayerCost(BETWEEN, between, wide, wide, 0))
    return rows


class _Macs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts multiplications of products and convolutions, by torch's formulas."""

    macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.macs += count(*args, **kwargs, out_val=output) // 2
        return output


def _width(quantizers: list[Quantizer], role: str) -> int:
    """The widest grid among quantizers of a role."""
    widths = (FLOAT_BITS if each.is_disabled else each.spec.bits for each in quantizers if each.role == role)
    return max(widths, default=FLOAT_BITS)


def _weight_bytes(layer: nn.Module, args: Any, kwargs: Any) -> int:
    """Bytes of the weight of a call, which may be an argument, and of its bias, or that of the norm that it folds."""
    own = {key: getattr(layer, key, None) for key in ("weight", "bias")}
    given = own if own["weight"] is not None else dict(zip(own, args[1:3], strict=False)) | kwargs
    weight, bias, norm = given.get("weight"), given.get("bias"), kwargs.get("norm")
    if not isinstance(weight, Tensor):
        return 0
    bits = _width([layer.weight_quantizer], "weight") if isinstance(layer, QuantLayer) else FLOAT_BITS
    biases = norm.num_features if norm is not None else bias.numel() if isinstance(bias, Tensor) else 0
    return -(-weight.numel() * bits // 8) + 4 * biases


def _multiplied(model: nn.Module) -> list[Quantizer]:
    """The quantizers of what products of two activations read."""
    products = ((node, part) for _, part in graphs_of(model) for node in part.graph.nodes if is_product(node, part))
    grids = ((grid_of(each, part), part) for node, part in products for each in node.all_input_nodes)
    found = [submodule_of(part, grid) for grid, part in grids if grid is not None]
    return [each for each in found if isinstance(each, Quantizer)]
