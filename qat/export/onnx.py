"""`export_onnx`: a prepared model as an ONNX file with integer initializers."""

import contextlib
import copy
import io
import logging
import operator
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.evaluating import evaluating
from qat.export.integer import MOST_BITS, OPSET, ActivationGrid, GlobalAveragePool, IntegerLayer
from qat.layers import QuantLayer
from qat.preparation.operations import SPLITTING_FUNCTIONS, SPLITTING_METHODS, passes_grid
from qat.preparation.placement import grid_of
from qat.preparation.tracing import submodule_of
from qat.quantizer import Quantizer


def export_onnx(
    model: fx.GraphModule, path: str | os.PathLike[str], example_inputs: Tensor | tuple[Tensor, ...]
) -> None:
    """Write the model in QuantizeLinear/DequantizeLinear form: int8 weights, int32 biases, trained grids.

    Nothing is observed again. BatchNorm is folded into the weight's scale; fewer than 8 bits are stored in 8-bit
    containers with the same integers. The batch axis is free. The output of quantizer `layer1.0.add_quantizer` is
    called `layer1.0.add_quantizer` in the file, which is how `compare_layers` finds it.

    Args:
        model: a prepared and calibrated model; it is not changed.
        path: the file to write; an existing one is replaced, atomically.
        example_inputs: a tensor or a tuple, only their shapes matter; the first axis is the batch.

    Raises:
        TypeError: if the model is not a prepared one.
        ValueError: if a quantizer is not calibrated, not exportable or wider than 8 bits, or if the ONNX graph lacks
            a quantizer of the model.
    """
    import onnx

    _check_exportable(model)
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    # Two samples at least: with one, torch.export takes the batch for a constant.
    inputs = tuple((torch.cat([x, x]) if len(x) == 1 else x).detach().cpu().float().contiguous() for x in inputs)
    integer_model = to_integer_modules(model)
    names = [node.name for node in integer_model.graph.nodes if node.op == "placeholder"]
    with _quiet():
        program = torch.onnx.export(
            integer_model,
            inputs,
            dynamo=True,
            opset_version=OPSET,
            input_names=names[: len(inputs)],
            dynamic_shapes=[{0: torch.export.Dim.DYNAMIC} for _ in inputs],
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    _strip_traces(proto)
    _name_quantizers(proto, integer_model)
    onnx.checker.check_model(proto)
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        scratch.write_bytes(proto.SerializeToString())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def to_integer_modules(model: fx.GraphModule) -> fx.GraphModule:
    """A copy of a prepared model, on the CPU, whose quantizers and layers are ONNX operators on frozen integers."""
    frozen = copy.deepcopy(model).cpu().float().eval()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    replacements: list[tuple[str, nn.Module]] = []
    for number, node in enumerate(list(frozen.graph.nodes)):
        module = submodule_of(frozen, node)
        if isinstance(module, QuantLayer):
            # One module a call: a shared layer has other integers on another grid.
            name = f"integer_{number}"
            frozen.add_submodule(name, IntegerLayer(module, *_handed(frozen, node)))
            node.target, node.kwargs = name, {}
        elif isinstance(module, Quantizer):
            replacements.append((str(node.target), ActivationGrid(module)))
        elif _averages_all(node, module) and _scales_fit(node, frozen):
            name = f"global_average_pool_{number}"
            frozen.add_submodule(name, GlobalAveragePool())
            node.op, node.target, node.args, node.kwargs = "call_module", name, node.args[:1], {}
        elif (source := _grid_to_restate(node, frozen)) is not None:
            _restate_grid(node, source)
    for name, grid in replacements:
        frozen.set_submodule(name, grid)
    frozen.graph.eliminate_dead_code()
    frozen.recompile()
    return frozen


def _grid_to_restate(node: fx.Node, model: fx.GraphModule) -> fx.Node | None:
    """The quantizer to state again behind an operation that carries its grid through where ONNX Runtime does not.

    That is Pad and a part of a Split; and with a signed grid max pooling and reshaping too: there ONNX Runtime 1.31
    writes a zero point of the wrong type itself and refuses its own graph.
    """
    source = (
        grid_of(node, model)
        if passes_grid(node, model) and node.target not in SPLITTING_FUNCTIONS | SPLITTING_METHODS
        else None
    )
    if source is None:
        return None
    grid = model.get_submodule(str(source.target))
    assert isinstance(grid, Quantizer)
    return source if node.target in (F.pad, operator.getitem) or grid.spec.signed else None


def _restate_grid(node: fx.Node, source: fx.Node) -> None:
    """Quantize a padded tensor again, on its own grid: it changes nothing, and without it ONNX Runtime, which carries
    grids through max pooling and reshaping but not through Pad, computes the next operation in float."""
    with node.graph.inserting_after(node):
        again = node.graph.call_module(str(source.target))
    node.replace_all_uses_with(again)
    again.args = (node,)


def _handed(model: fx.GraphModule, node: fx.Node) -> tuple[Quantizer, nn.Module | None]:
    """The grid and the BatchNorm that a layer's call is given."""
    grid, norm = node.kwargs["grid"], node.kwargs.get("norm")
    assert isinstance(grid, fx.Node)
    quantizer = model.get_submodule(str(grid.target))
    assert isinstance(quantizer, Quantizer)
    return quantizer, model.get_submodule(str(norm.target)) if isinstance(norm, fx.Node) else None


def _averages_all(node: fx.Node, module: nn.Module | None) -> bool:
    size: Any = module.output_size if isinstance(module, nn.AdaptiveAvgPool2d) else None
    if node.target is F.adaptive_avg_pool2d:
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size")
    return size in (1, (1, 1), [1, 1])


def _scales_fit(node: fx.Node, model: fx.GraphModule) -> bool:
    """Whether ONNX Runtime's integer average takes these grids: it stops at 256 and above, and below 2^-32."""
    source = grid_of(node.args[0], model) if isinstance(node.args[0], fx.Node) else None
    reader = next((user for user in node.users if isinstance(submodule_of(model, user), Quantizer)), None)
    if source is None or reader is None:
        return True  # without grids on both sides it stays a float operation
    before, after = (model.get_submodule(str(end.target)) for end in (source, reader))
    assert isinstance(before, Quantizer) and isinstance(after, Quantizer)
    # The image size divides the ratio; leaving it out keeps within the upper bound, and 2^16 pixels within the lower.
    ratio = float(before.grid()[0]) / float(after.grid()[0])
    return 2.0**-16 <= ratio < 256


def _check_exportable(model: nn.Module) -> None:
    quantizers = {name: module for name, module in model.named_modules() if isinstance(module, Quantizer)}
    if not isinstance(model, fx.GraphModule) or not quantizers:
        raise TypeError(
            f"export_onnx: expected a model from qat.prepare, got {type(model).__name__} without quantizers"
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
    if isinstance(owner, QuantLayer) and owner.weight_quantizer is quantizer:
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


def _name_quantizers(proto: Any, model: fx.GraphModule) -> None:
    """Give every QuantizeLinear the name of its quantizer, and fail loudly if one is missing."""
    expected = [str(node.target) for node in model.graph.nodes if isinstance(submodule_of(model, node), ActivationGrid)]
    # The last integer tensor of a quantizer: QuantizeLinear, or the Clip behind it.
    quantized = [node for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    if len(quantized) != len(expected):
        raise ValueError(f"export_onnx: the model has {len(expected)} quantizers and the ONNX graph {len(quantized)}")
    readers: dict[str, list[Any]] = {}
    for node in proto.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    seen: dict[str, int] = {}
    for node, name in zip(quantized, expected, strict=True):
        following = readers.get(node.output[0], [])
        last = following[0] if following and following[0].op_type == "Clip" else node
        seen[name] = seen.get(name, -1) + 1
        new = f"{name}.{seen[name]}" if seen[name] else name
        for reader in readers.get(last.output[0], []):
            reader.input[:] = [new if old == last.output[0] else old for old in reader.input]
        last.output[0] = new
        node.name = new


def _strip_traces(proto: Any) -> None:
    """Drop the exporter's Python stack traces: they name this machine's paths and weigh more than the operators."""
    del proto.graph.metadata_props[:]
    del proto.graph.value_info[:]
    for part in (*proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's progress lines and its own deprecation warnings from the user's terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
