"""`export_onnx`: a prepared model as an ONNX file with integer initializers."""

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from qat.atomic_write import atomic_write
from qat.evaluating import evaluating
from qat.export.integers.freezing import expected_quantizers, to_integer_modules
from qat.export.onnx.initializers import name_weights, own_initializers
from qat.export.onnx.operators import MOST_BITS, OPSET, QUANTIZER
from qat.layers import QuantFunction, QuantLayer
from qat.preparation.report import LEFT_IN_FLOAT
from qat.quantizer import Quantizer
from qat.silence import warnings_ignored

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


def export_onnx(model: nn.Module, path: str | os.PathLike[str], example_inputs: Inputs) -> None:
    """Write the model in QuantizeLinear/DequantizeLinear form: int8 weights, int32 biases, trained grids.

    Nothing is observed again. BatchNorm is folded into the weight's scale; fewer than 8 bits are stored in 8-bit
    containers with the same integers. The batch axis is free where the model lets it. The output of quantizer
    `layer1.0.add_quantizer` is called `layer1.0.add_quantizer` in the file, which is how `compare_layers` finds it.

    Args:
        model: a prepared and calibrated model, or a module of quantized layers of your own; it is not changed. Of a
            model that was prepared in parts, export the parts: `qat.preparation.parts.prepared_parts(model)`.
        path: the file to write; an existing one is replaced, atomically.
        example_inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments; of floating-point tensors
            only the shapes matter. The first axis is the batch.

    Raises:
        TypeError: if the model holds no quantizer, or the path is none.
        ValueError: if the model was prepared in parts, if a quantizer is not calibrated, not exportable or wider than
            8 bits, or if the ONNX graph lacks a quantizer of the model.
    """
    import onnx

    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"export_onnx: path must be text or a Path, got {type(path).__name__}; the order is model, path,"
            " example_inputs"
        )
    _check_exportable(model)
    frozen = to_integer_modules(model)
    program = _exported(frozen, example_inputs)
    proto = program.model_proto
    _name_quantizers(proto, expected_quantizers(frozen))
    name_weights(proto)
    own_initializers(proto)
    _strip_traces(proto)
    _fix_sizes(program, proto)
    onnx.checker.check_model(proto)
    with atomic_write(Path(path)) as temporary:
        temporary.write_bytes(proto.SerializeToString())


def example_arguments(example_inputs: Inputs, samples: int = 2) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments, on the CPU, in float32, so many samples at least: one or two."""

    def ready(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        # With one sample, torch.export takes the batch for a constant.
        x = torch.cat([x, x]) if x.dim() and len(x) < samples else x
        x = x.detach().cpu()
        return (x.float() if x.is_floating_point() else x).contiguous()

    moved = pytree.tree_map(ready, example_inputs)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return (moved if isinstance(moved, tuple) else (moved,)), {}


def _exported(frozen: nn.Module, example_inputs: Inputs) -> Any:
    """The exporter's program, with a free first axis; with a fixed one where the model takes no other length."""
    order = list(inspect.signature(frozen.forward).parameters)

    def run(samples: int) -> Any:
        args, kwargs = example_arguments(example_inputs, samples)
        kwargs = dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
        shapes = _free_batch(frozen, args, kwargs) if samples > 1 else None
        with _quiet():
            return torch.onnx.export(
                frozen, args, kwargs=kwargs, dynamo=True, opset_version=OPSET, dynamic_shapes=shapes, verbose=False
            )

    try:
        return run(2)
    except Exception:  # an unbatched image, whose first axis are its channels; or what no exporter takes
        with contextlib.suppress(Exception):
            return run(1)
        raise


def _free_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every tensor's first axis may have any length; torch.export fixes those that the model takes for a number."""

    def free(x: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(x, Tensor) and x.dim() else None

    return tuple(pytree.tree_map(free, args)) if args else pytree.tree_map(free, kwargs)


def _fix_sizes(program: Any, proto: Any) -> None:
    """Write the sizes that torch.export took for numbers into the file, which calls them free; say so of a batch."""
    exported = program.exported_program
    names = exported.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    tensors = [values[name] for name in names if isinstance(values.get(name), Tensor)]
    for tensor, declared in zip(tensors, proto.graph.input, strict=True):
        axes = declared.type.tensor_type.shape.dim
        fixed = [_fixed(size, exported) for size in tensor.shape]
        for size, axis in zip(fixed, axes, strict=True):
            if size is not None:
                axis.dim_value = size
        if fixed and fixed[0] is not None:
            warnings.warn(
                f"export_onnx: the first axis of the input {declared.name!r} is fixed at {fixed[0]}, for the model"
                " computes with it as with a number",
                stacklevel=3,
            )


def _fixed(size: Any, exported: Any) -> int | None:
    """The only length that an axis may have; None if it is free."""
    if isinstance(size, int):
        return size
    limits = exported.range_constraints.get(size.node.expr)
    return int(limits.lower) if limits is not None and limits.lower == limits.upper else None


def _check_exportable(model: nn.Module) -> None:
    quantizers = {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
    if not quantizers:
        raise TypeError(
            f"export_onnx: expected a model from qat.prepare, got {type(model).__name__} without quantizers"
        )
    if LEFT_IN_FLOAT in vars(model) and not isinstance(model, fx.GraphModule):
        raise ValueError(
            f"export_onnx: {type(model).__name__} was prepared in parts, for its forward has no one graph; export each"
            " part, see qat.preparation.parts.prepared_parts(model)"
        )
    for name, quantizer in quantizers.items():
        refusal = quantizer.refusal()
        if refusal is not None:
            raise ValueError(f"export_onnx: {name!r} {refusal}")
        if not quantizer.is_calibrated:
            raise ValueError(f"export_onnx: {name!r} has no range yet; call qat.calibrate(model, batches) first")
        low, high = quantizer.bounds()
        if high - low >= 2**MOST_BITS:
            raise ValueError(
                f"export_onnx: {name!r} has the integers {low} to {high}; ONNX Runtime's integer kernels take at most"
                f" {MOST_BITS} bits"
            )
        with evaluating(quantizer):
            agrees = keeps_to_its_grid(quantizer, _tensor_of(model, name, quantizer))
        if not agrees:
            raise ValueError(
                f"export_onnx: {name!r}: the rule {quantizer.spec.rule!r} computes other values in quantize(x) than its"
                " codes(x) and grid() say; make them agree, or set exportable = False"
            )


def _tensor_of(model: nn.Module, name: str, quantizer: Quantizer) -> Tensor:
    """What the quantizer has to agree on: the weight itself, or points inside, outside and between the levels."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, QuantLayer) and owner.weight_quantizer is quantizer and not isinstance(owner, QuantFunction):
        return owner.channels_first(owner.weight.detach())
    scale, zero_point = quantizer.grid()
    low, high = quantizer.bounds()
    points = torch.linspace(low - 1.3, high + 1.7, 61, device=scale.device)
    return (points - zero_point.reshape(*zero_point.shape[:-1], -1)) * scale.reshape(*scale.shape[:-1], -1)


@torch.no_grad()
def keeps_to_its_grid(quantizer: Quantizer, x: Tensor) -> bool:
    """Whether quantize(x) = (codes(x) - zero_point) * scale."""
    scale, zero_point = quantizer.grid(x)
    expected = (quantizer.codes(x) - zero_point) * scale
    # NaN weights are another sentence's business.
    off = (quantizer.quantize(x) - expected).abs() > 1e-5 * expected.abs() + 1e-6 * scale
    return not bool(off.any())


def _name_quantizers(proto: Any, expected: Mapping[str, tuple[float, ...]]) -> None:
    """Give every QuantizeLinear the name of its quantizer, and fail loudly if one is missing.

    Two quantizers with the same grid on the same tensor become one operator, with the name of one of them.
    """
    readers: dict[str, list[Any]] = {}
    for node in proto.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    seen: dict[str, int] = {}
    for node in proto.graph.node:
        name = next((entry.value for entry in node.metadata_props if entry.key == QUANTIZER), None)
        if name is None:
            continue
        following = readers.get(node.output[0], [])
        # The last integer tensor of a quantizer: QuantizeLinear, or the Clip behind it.
        last = following[0] if following and following[0].op_type == "Clip" else node
        seen[name] = seen.get(name, -1) + 1
        new = f"{name}.{seen[name]}" if seen[name] else name
        for reader in readers.get(last.output[0], []):
            reader.input[:] = [new if old == last.output[0] else old for old in reader.input]
        last.output[0] = new
        node.name = new
    present = {expected[name] for name in seen}
    missing = sorted(name for name, grid in expected.items() if name not in seen and grid not in present)
    if missing:
        raise ValueError(
            f"export_onnx: {len(missing)} of the model's {len(expected)} quantizers are not in the ONNX graph:"
            f" {', '.join(missing[:5])}"
        )


def _strip_traces(proto: Any) -> None:
    """Drop the exporter's Python stack traces: they name this machine's paths and weigh more than the operators."""
    del proto.graph.metadata_props[:]
    del proto.graph.value_info[:]
    for part in (*proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's log and its own deprecation warnings from the user's terminal; one thread at a time."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    with warnings_ignored():
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
