"""A frozen model through torch.onnx's exporter, and the sizes of its axes."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from qat.contexts import warnings_ignored
from qat.export.checks import result_names
from qat.export.onnx.graph import tensor_names
from qat.export.onnx.names import rename_inputs_outputs
from qat.inputs import Inputs, as_arguments
from qat.torch_internals import argument_names, pytree

if TYPE_CHECKING:
    from onnx import ModelProto

Axes = Sequence[Literal["batch", "height", "width"]]
"""Names of axes whose sizes are free: the first one of all tensors, the others of images alone."""

PLACES = {"batch": 0, "height": 2, "width": 3}


def export_program(frozen: nn.Module, example_inputs: Inputs, opset: int, dynamic: Axes) -> torch.onnx.ONNXProgram:
    """Run the exporter; a batch that alone is free is not if the model takes one length."""
    order = list(inspect.signature(frozen.forward).parameters)

    def run(samples: int, dynamic: Axes) -> torch.onnx.ONNXProgram:
        args, kwargs = _example_arguments(example_inputs, samples)
        kwargs = dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
        auto = torch.export.Dim.AUTO  # free, unless the model computes with the length
        shapes = pytree.tree_map(lambda x: dict.fromkeys(_free(x, dynamic), auto) or None, args or kwargs)
        with quiet_export():
            program = torch.onnx.export(
                frozen, args, kwargs=kwargs, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False,
                custom_translation_table={torch.ops.aten.atan2.default: _atan2},
            )  # fmt: skip
        assert program is not None  # it is where dynamo is True
        return program

    try:
        return run(1 + ("batch" in dynamic), dynamic)
    except Exception:  # an unbatched image, whose first axis is its channels; or a model that cannot be exported
        with contextlib.suppress(Exception):
            if list(dynamic) == ["batch"]:
                return run(1, ())
        raise


def _atan2(y: Any, x: Any) -> Any:
    # atan2 as ONNX's operators; torch.onnx's own is -pi where y = 0 and x < 0.
    from onnxscript import opset18

    op: Any = opset18
    zero, half = op.Sub(x, x), op.CastLike(math.pi, x)
    turned = op.Where(op.Less(x, zero), op.Where(op.Less(y, zero), op.Neg(half), half), zero)
    return op.Add(op.Where(op.Equal(y, zero), zero, op.Atan(op.Div(y, x))), turned)


def refuse_lost_options(exported: ExportedProgram) -> None:
    """Refuse options that torch.onnx drops, or that ONNX interprets otherwise."""
    for node in exported.graph.nodes:
        for name, value in (*zip(argument_names(node.target), node.args, strict=False), *node.kwargs.items()):
            # An antialiased interpolation loses its corners and scale; an average its divisor.
            smooth = "2d_aa" in str(node.target) and name.startswith(("align_corners", "scale"))
            if value and (smooth or name == "divisor_override"):
                module, _ = list(node.meta.get("nn_module_stack", {"": ("", "")}).values())[-1]
                cure = "interpolate to a size, or without antialias" if smooth else "multiply the average by a number"
                raise ValueError(f"export_onnx: {module or node.name}: torch.onnx loses {name}={value}; {cure}")


def _example_arguments(example_inputs: Inputs, samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def ready(x: Tensor) -> Tensor:
        # torch.export takes a batch of one for a constant.
        x = torch.cat([x, x]) if x.dim() and len(x) < samples else x
        x = x.detach().cpu()
        return (x.float() if x.is_floating_point() else x).contiguous()

    return as_arguments(pytree.tree_map_only(Tensor, ready, example_inputs))


def fix_sizes(exported: ExportedProgram, proto: ModelProto, dynamic: Axes) -> None:
    """Write the sizes that torch.export found to be fixed; warn of a fixed batch."""
    names = exported.graph_signature.user_inputs  # constants among the arguments are no inputs of the file
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
    tensors = [values[name] for name in names if isinstance(values.get(name), Tensor)]
    known: dict[str, str] = {}
    for tensor, declared in zip(tensors, proto.graph.input, strict=True):
        axes = declared.type.tensor_type.shape.dim
        fixed = [_fixed(size, exported) for size in tensor.shape]
        for size, axis in zip(fixed, axes, strict=True):
            if size is not None:
                axis.dim_value = size
        for place, name in _free(tensor, dynamic).items():
            if fixed[place] is None:
                taken = name in known.values()
                known.setdefault(str(tensor.shape[place]), f"{name}_{declared.name}" if taken else name)
                continue
            said = f"export_onnx: the {name if place else 'first axis'} of the input {declared.name!r} is fixed at"
            said += f" {fixed[place]}, for the model computes with it as with a number"
            if place:
                raise ValueError(f"{said}; leave {name!r} out of dynamic")
            warnings.warn(said, stacklevel=3)
    if missing := {*dynamic} - {"batch", *known.values()}:
        raise ValueError(f"export_onnx: dynamic: no image (N, C, H, W) has a free {min(missing)} of its own")
    for end in (*proto.graph.input, *proto.graph.output):
        for axis in end.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = re.sub(r"\w+", lambda found: known.get(found[0], found[0]), axis.dim_param)


def name_outputs(exported: ExportedProgram, proto: ModelProto) -> None:
    """Name the outputs by `result_names`, with "output." before a name that is taken."""
    taken = tensor_names(proto.graph) - {end.name for end in proto.graph.output}
    names = result_names(exported)
    rename_inputs_outputs(proto, None, [f"output.{name}" if name in taken else name for name in names])


def _fixed(size: int | torch.SymInt, exported: ExportedProgram) -> int | None:
    # The only length that an axis may have; None if it is free.
    if isinstance(size, int):
        return size
    limits = exported.range_constraints.get(size.node.expr)
    return int(limits.lower) if limits is not None and limits.lower == limits.upper else None


def _free(x: object, dynamic: Axes) -> dict[int, str]:
    most = 0 if not isinstance(x, Tensor) else 4 if x.dim() == 4 and x.is_floating_point() else min(x.dim(), 1)
    return {place: name for name, place in PLACES.items() if name in dynamic and place < most}


def larger(inputs: Inputs, dynamic: Axes, height: int, width: int) -> Any:
    """Return random images in place of those that may be larger by so much."""

    def other(x: Tensor) -> Tensor:
        more = {place: (0, 0, height, width)[place] for place in _free(x, dynamic)}
        sizes = [size + more.get(place, 0) for place, size in enumerate(x.shape)]
        return x if sizes == [*x.shape] else torch.randn(sizes, generator=torch.Generator().manual_seed(0))

    return pytree.tree_map_only(Tensor, other, inputs)


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Silence the exporter's log and its deprecation warnings; one thread at a time."""
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
