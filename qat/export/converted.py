"""The integers of a prepared model, in torch (`convert`) and NumPy."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from qat.contexts import in_full_precision
from qat.export.checks import check_exportable, check_integers, frozen_for, warn_of_hooks
from qat.functional.tensors import require_floating
from qat.inputs import expect_model
from qat.integers.evaluation import evaluation_copy, joined, numbered
from qat.integers.frozen import (
    TRAINED_BITS,
    FrozenLayer,
    FrozenParameter,
    FrozenQuantizer,
    FrozenTable,
    NotANumberError,
    Operations,
)
from qat.kernels import plain_formulas
from qat.preparation.refusals import wrapped
from qat.torch_internals import children_of, decomposed_operators, parameters_of

Execution = Literal["reference", "export"]
Array = npt.NDArray[Any]


class IntegerModel(nn.Module):
    """The result of `convert`: a graph that computes with integer weights and biases.

    Attributes:
        graph_module: the graph, a `torch.fx.GraphModule`; its code is readable.
        execution: as of `convert`.
    """

    def __init__(self, graph_module: nn.Module, execution: Execution) -> None:
        super().__init__()
        self.graph_module, self.execution = graph_module, execution
        self.eval()  # there is nothing to train

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the prepared model returns in evaluation."""
        if self.execution == "export":
            return self.graph_module(*args, **kwargs)
        with torch.no_grad(), plain_formulas():
            return self.graph_module(*args, **kwargs)


@in_full_precision
def convert(model: nn.Module, execution: Execution = "reference") -> IntegerModel:
    """Return a plain module that computes the model's evaluation from integers alone.

    It holds no quantizer and no float weight of a quantized layer: weights are int8, biases int32 values.

    Without pickle it is saved by `torch.export.save(torch.export.export(made, inputs), file)` and loaded by torch alone
    ("export" after `import torch.ao.quantization.fx._decomposed`, which registers its operators). The `state_dict()` of
    what is returned lacks the grids. The prepared model itself evaluates on integers faster.

    Args:
        model: a prepared and calibrated model; it is not changed.
        execution: how the same integers are computed:

            - "reference": torch's operations alone, on any device, in the order of evaluation.
            - "export": `torch.ops.quantized_decomposed` around float operators, the form that torch.export hands to
              torch.compile, AOTInductor and ExecuTorch. Biases are floats there.

    Raises:
        TypeError: if the model holds no quantizer.
        ValueError: for another execution, if the model was prepared in parts, or if a quantizer has no integers of at
            most 16 bits.

    >>> import qat
    >>> x = torch.rand(8, 3, 8, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval(), example_inputs=x)
    >>> qat.calibrate(model, [x])
    >>> integers = qat.convert(model)
    >>> torch.equal(integers(x), model(x))
    True
    """
    expect_model(convert, model)
    if execution not in get_args(Execution):
        raise ValueError(f"convert: execution must be one of {', '.join(get_args(Execution))}, got {execution!r}")
    inside = wrapped(model)
    model = model if inside is None else inside[1]
    check_exportable(model, "convert", TRAINED_BITS)
    warn_of_hooks(model, "convert")
    with torch.no_grad():
        return IntegerModel(_converted(evaluation_copy(model), execution), execution)


def _converted(evaluated: nn.Module, execution: Execution) -> nn.Module:
    exported = execution == "export"
    frozen = frozen_for("convert", evaluated, ExportOperations() if exported else IntegerOperations())
    if isinstance(frozen, fx.GraphModule):
        frozen = fx.GraphModule(frozen, frozen.graph)  # a plain class, without the engine of evaluation on codes
    for name, module in list(frozen.named_modules()):
        if isinstance(module, FrozenQuantizer) and exported:
            frozen.set_submodule(name, ExportedQuantizer(module))
        elif isinstance(module, FrozenLayer):
            if exported:  # compilers ask for int64 constants
                module.weight_zero_point = nn.Buffer(module.weight_zero_point.long())
            held = parameters_of(module.twin)  # its float weight and quantizers compute nothing any more
            held.update(dict.fromkeys(held))
            children_of(module.twin).clear()
    return frozen


class IntegerOperations(Operations):
    """Arithmetic of evaluation, to the bit; NaN, which has no integer, is refused."""

    sums_integers = as_trained = True

    def quantize(
        self, x: Tensor, scale: Tensor, zero_point: Tensor, bounds: tuple[Tensor, Tensor] | None, quantizer: str
    ) -> Tensor:
        """Return clamp(round(x / scale) + zero_point, *bounds)."""
        if not torch.compiler.is_compiling() and bool(require_floating(x, quantizer).isnan().any()):
            raise NotANumberError(quantizer)
        return super().quantize(x, scale, zero_point, bounds, quantizer)


class ExportOperations(Operations):
    """Constants dequantized by torch.export's operators."""

    float_biases = as_trained = True

    def __init__(self) -> None:
        self.operators = decomposed_operators()

    def dequantize(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int | None = None, layer: str | None = None
    ) -> Tensor:
        """Return (codes - zero_point) * scale."""
        limits, ops = torch.iinfo(codes.dtype), self.operators
        points = torch.zeros_like(scale, dtype=torch.int64) if zero_point is None else zero_point
        if axis is None:
            y: Tensor = ops.dequantize_per_tensor.tensor(codes, scale, points, limits.min, limits.max, codes.dtype)
        else:
            y = ops.dequantize_per_channel.default(codes, scale, points, axis, limits.min, limits.max, codes.dtype)
        return y


class ExportedQuantizer(nn.Module):
    """A grid of activations as a pair of operators with constant numbers."""

    def __init__(self, quantizer: FrozenQuantizer) -> None:
        super().__init__()
        self.numbers = (*quantizer.grid(), quantizer.zero_point.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Round x to the grid."""
        ops = decomposed_operators()
        codes = ops.quantize_per_tensor.default(x, *self.numbers)
        y: Tensor = ops.dequantize_per_tensor.default(codes, *self.numbers)
        return y


@dataclass(frozen=True)
class IntegerArrays:
    """The integers of one layer: real weight = (weight - zero_point) * scale.

    A layer whose input has a grid computes y = (sum((x - input_zero_point) * weight) + bias) * bias_scale, with x the
    codes of its input, and bias_scale = input_scale * scale. BatchNorm is folded in.

    Every grid is the trained one, as `summary` and the quantizers have it. A .tflite file has the same integers, but
    that those of fewer than 8 bits and of unsigned grids end at 127; an ONNX file adds 128 to a signed grid with a zero
    point, which it stores in uint8.

    Attributes:
        weight: int8, in the shape of the float layer's weight; tables and parameters on an unsigned grid are uint8. Of
            more than 8 bits it and all zero points are int16 or uint16.
        scale: float32, (channels,): of the output, of an embedding (rows,), of a parameter ().
        zero_point: in the type of weight and the shape of scale; 0 for layers.
        bias: int32, (channels,), on the grid of bias_scale; None for tables, parameters and layers whose input is in
            float (`activation_spec=None`), as all that follow.
        bias_scale: float32, (channels,).
        input_scale: float32, ().
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
    """Return every quantized layer's integers as NumPy arrays, on the trained grids.

    Args:
        model: a prepared and calibrated model, also one that was prepared in parts, or a module of quantized layers
            of your own; it is not changed.

    Returns:
        Name of the layer to its integers. The second call of a shared layer, which may read another grid, is
        `<name>.1`. A quantized parameter that a matrix product reads has the name of its quantizer.

    Raises:
        TypeError: if the model holds no quantizer.
        ValueError: for a quantizer without integers: not calibrated, switched off, or of a rule
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
    frozen = frozen_for("integer_weights", evaluation_copy(model), IntegerOperations(), weights_alone=True)
    seen: Counter[str] = Counter()
    return {numbered(name, seen): arrays for name, arrays in arrays_of(frozen)}


def arrays_of(module: nn.Module, path: str = "") -> Iterator[tuple[str, IntegerArrays]]:
    """Yield layers' names and integers, as they run, or without a graph as registered."""
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
            yield from arrays_of(module.get_submodule(name), joined(path, name))


def _of_layer(layer: FrozenLayer) -> IntegerArrays:
    weight = layer.weight if layer.in_torch_layout else layer.twin.torch_layout(layer.weight)
    if layer.input_qparams is None:
        return IntegerArrays(*map(_array, (weight, layer.weight_scale, layer.weight_zero_point)))
    scale, zero_point = layer.input_qparams
    return IntegerArrays(
        weight=_array(weight),
        scale=_array(layer.weight_scale),
        zero_point=_array(layer.weight_zero_point),
        bias=_array(layer.bias),
        bias_scale=_array(layer.bias_scale),
        input_scale=_array(scale),
        input_zero_point=_array(zero_point),
    )


def _array(values: Tensor) -> Array:
    return np.ascontiguousarray(values.numpy()).reshape(values.shape)
