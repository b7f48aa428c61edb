"""`integer_weights`: the integers of a model's layers as NumPy arrays."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from qat.export.checks import check_integers, frozen_for
from qat.inputs import expect_model
from qat.integers.evaluation import evaluation_copy, joined, numbered
from qat.integers.frozen import FrozenLayer, FrozenParameter, FrozenTable, Operations

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class IntegerArrays:
    """The integers of one layer: real weight = (weight - zero_point) * scale.

    A layer whose input has a grid computes y = (sum((x - input_zero_point) * weight) + bias) * bias_scale, with x the
    codes of its input, and bias_scale = input_scale * scale. BatchNorm is folded in.

    Attributes:
        weight: int8, in the shape of the float layer's weight; tables and parameters on an unsigned grid are uint8.
        scale: float32, (channels,): of the output, of an embedding (rows,), of a parameter ().
        zero_point: in the type of weight and the shape of scale; 0 for layers.
        bias: int32, (channels,), on the grid of bias_scale; None for tables, parameters and layers whose input is in
            float (`activation_spec=None`), as all that follow.
        bias_scale: float32, (channels,).
        input_scale: float32, (), of a bilinear layer (2,).
        input_zero_point: uint8 or int8, in the shape of input_scale.
    """

    weight: Array
    scale: Array
    zero_point: Array
    bias: Array | None = None
    bias_scale: Array | None = None
    input_scale: Array | None = None
    input_zero_point: Array | None = None


@torch.no_grad()
def integer_weights(model: nn.Module) -> dict[str, IntegerArrays]:
    """Return every quantized layer's integers as NumPy arrays, as in ONNX files.

    Args:
        model: a prepared and calibrated model, also one that was prepared in parts, or a module of quantized layers
            of your own; it is not changed.

    Returns:
        Name of the layer to its integers. The second call of a shared layer, which may read another grid, is
        `<name>.1`. A quantized parameter that a matrix product reads has the name of its quantizer.

    Raises:
        TypeError: if the model holds no quantizer.
        ValueError: for a quantizer without integers of at most 8 bits: not calibrated, switched off, or of a rule
            that has none.

    >>> import qat
    >>> layer = qat.QuantLinear(4, 2)
    >>> qat.calibrate(layer, [torch.randn(64, 4)])
    >>> arrays = qat.integer_weights(layer)[""]
    >>> arrays.weight.dtype, arrays.weight.shape, arrays.bias.dtype, arrays.input_zero_point.dtype
    (dtype('int8'), (2, 4), dtype('int32'), dtype('uint8'))
    >>> real = arrays.weight * arrays.scale[:, None]
    >>> bool(abs(real - layer.weight.detach().numpy()).max() <= arrays.scale.max() / 2 + 1e-6)
    True
    """
    expect_model(integer_weights, model)
    check_integers(model, "integer_weights")
    frozen = frozen_for("integer_weights", evaluation_copy(model), Operations(), weights_alone=True)
    seen: Counter[str] = Counter()
    return {numbered(name, seen): arrays for name, arrays in _arrays(frozen, "")}


def _arrays(module: nn.Module, path: str) -> Iterator[tuple[str, IntegerArrays]]:
    # In the order in which the layers run, or without a graph in that of their registration.
    if isinstance(module, FrozenLayer):
        yield module.layer_name, _of_layer(module)
    elif isinstance(module, FrozenParameter):
        yield module.quantizer_name, IntegerArrays(*map(_array, (module.codes, module.scale, module.zero_point)))
    elif isinstance(module, FrozenTable):
        table = IntegerArrays(*map(_array, (module.codes, module.scale, module.zero_point)))
        yield path.rpartition("rows")[0].rstrip("."), table
    else:
        names = [name for name, _ in module.named_children()]
        if isinstance(module, fx.GraphModule):
            names = [str(node.target) for node in module.graph.nodes if node.op == "call_module"]
        for name in dict.fromkeys(names):
            yield from _arrays(module.get_submodule(name), joined(path, name))


def _of_layer(layer: FrozenLayer) -> IntegerArrays:
    weight = layer.weight if layer.in_torch_layout else layer.twin.torch_layout(layer.weight)
    if not layer.input_qparams:
        return IntegerArrays(*map(_array, (weight, layer.weight_scale, layer.weight_zero_point)))
    scales, zero_points = zip(*layer.input_qparams, strict=True)
    several = len(scales) > 1
    return IntegerArrays(
        weight=_array(weight),
        scale=_array(layer.weight_scale),
        zero_point=_array(layer.weight_zero_point),
        bias=_array(layer.bias),
        bias_scale=_array(layer.bias_scale),
        input_scale=_array(torch.stack(scales) if several else scales[0]),
        input_zero_point=_array(torch.stack(zero_points) if several else zero_points[0]),
    )


def _array(values: Tensor) -> Array:
    return np.ascontiguousarray(values.numpy()).reshape(values.shape)
