"""A float .tflite file of a network of convolutions: what ai-edge-quantizer starts from."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.optimization import fuse
from torch.fx.passes.shape_prop import ShapeProp

from qat.export.litert.file import ModelFile

CLIPS: dict[Any, str] = {nn.ReLU: "RELU", F.relu: "RELU", nn.ReLU6: "RELU6"}
"""What a convolution and a sum take along."""

CHANNEL_AXIS = (0, 2, 3, 1)
"""Where a file has the axes of an image."""


def float_file(model: nn.Module, image: Tensor) -> bytes:
    """The file of a model in evaluation mode, its BatchNorms folded, for one image (1, C, H, W).

    It knows what ResNet-20 and MobileNetV2 need, and raises KeyError for other operations.
    """
    graph = cast("fx.GraphModule", fuse(model))
    ShapeProp(graph).propagate(image)
    writer = _Writer(graph)
    for node in graph.graph.nodes:
        writer.write(node)
    return writer.file.packed({"x": writer.input}, {"y": writer.output}, {})


class _Writer:
    """Tensors of the file by the nodes of the graph."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph, self.file = graph, ModelFile()
        self.tensors: dict[fx.Node, int] = {}
        self.input = self.output = -1

    def write(self, node: fx.Node) -> None:
        """Add a node, unless the one before has taken it along."""
        if node in self.tensors:
            return
        if node.op == "placeholder":
            self.input = self.tensors[node] = self.file.tensor("x", _stored(_shape(node)), "FLOAT32")
        elif node.op == "output":
            self.output = self.of(node.args[0])
        else:
            KINDS[self._kind(node)](self, node)

    def add(self, kind: str, node: fx.Node, inputs: Sequence[int], fuses: bool = False, **options: Any) -> None:
        """An operator whose result is that of the node, and of the clip behind it."""
        readers = list(node.users)
        clip = CLIPS.get(self._kind(readers[0])) if fuses and len(readers) == 1 else None
        if clip is not None:
            options["fusedActivationFunction"] = getattr(self.file.schema.ActivationFunctionType, clip)
        made = self.file.tensor(node.name, _stored(_shape(node)), "FLOAT32")
        self.file.operator(kind, inputs, [made], **options)
        self.tensors |= {node: made} if clip is None else {node: made, readers[0]: made}

    def of(self, node: Any) -> int:
        """The tensor of an operand."""
        return self.tensors[node]

    def pad(self, tensor: int, margins: Sequence[tuple[int, int]]) -> int:
        """A tensor with zeros around it."""
        shape = [size + sum(each) for size, each in zip(self.file.shapes[tensor], margins, strict=True)]
        made = self.file.tensor(f"{self.file.tensors[tensor].name}.padded", shape, "FLOAT32")
        self.file.operator("PAD", [tensor, self.numbers(margins)], [made])
        return made

    def numbers(self, values: Any) -> int:
        """A constant of integers; ai-edge-quantizer wants a name of its own for every tensor."""
        return self.file.constant(f"numbers.{len(self.file.shapes)}", np.array(values, np.int32))

    def _kind(self, node: fx.Node) -> Any:
        """The class of a module, or the function."""
        return type(self.graph.get_submodule(str(node.target))) if node.op == "call_module" else node.target


def _convolution(writer: _Writer, node: fx.Node) -> None:
    layer: Any = writer.graph.get_submodule(str(node.target))
    given, padding = writer.of(node.args[0]), writer.file.schema.Padding
    how = padding.VALID
    if any(layer.padding):
        # SAME puts the margin of a stride of 2 behind the image alone, and torch on both sides.
        if max(layer.stride) == 1:
            how = padding.SAME
        else:
            given = writer.pad(given, [(0, 0), *((each, each) for each in layer.padding), (0, 0)])
    depthwise = layer.groups > 1
    kind, order = ("DEPTHWISE_CONV_2D", (1, 2, 3, 0)) if depthwise else ("CONV_2D", (0, 2, 3, 1))
    weight = layer.weight.detach().permute(order).contiguous().numpy()
    constants = [writer.file.constant(f"{node.name}.weight", weight), _bias(writer, node, layer)]
    options = {"depthMultiplier": 1} if depthwise else {}
    (height, width), ones = layer.stride, {"dilationHFactor": 1, "dilationWFactor": 1}
    writer.add(
        kind, node, [given, *constants], fuses=True, padding=how, strideH=height, strideW=width, **ones, **options
    )


def _linear(writer: _Writer, node: fx.Node) -> None:
    layer: Any = writer.graph.get_submodule(str(node.target))
    weight = writer.file.constant(f"{node.name}.weight", layer.weight.detach().numpy())
    writer.add("FULLY_CONNECTED", node, [writer.of(node.args[0]), weight, _bias(writer, node, layer)])


def _bias(writer: _Writer, node: fx.Node, layer: Any) -> int:
    return writer.file.constant(f"{node.name}.bias", layer.bias.detach().numpy())


def _sum(writer: _Writer, node: fx.Node) -> None:
    writer.add("ADD", node, [writer.of(each) for each in node.args], fuses=True)


def _every_other(writer: _Writer, node: fx.Node) -> None:
    """x[:, :, ::a, ::b]."""
    given, places = writer.of(node.args[0]), node.args[1]
    steps = [places[axis].step or 1 for axis in CHANNEL_AXIS]  # type: ignore[index, union-attr]
    ends = [[0] * 4, writer.file.shapes[given], steps]
    writer.add("STRIDED_SLICE", node, [given, *map(writer.numbers, ends)])


def _new_channels(writer: _Writer, node: fx.Node) -> None:
    """F.pad of channels alone."""
    sides: Any = node.args[1]
    margins = [(0, 0), (0, 0), (0, 0), (sides[4], sides[5])]
    writer.add("PAD", node, [writer.of(node.args[0]), writer.numbers(margins)])


def _average(writer: _Writer, node: fx.Node) -> None:
    writer.add("MEAN", node, [writer.of(node.args[0]), writer.numbers([1, 2])], keepDims=True)


def _flat(writer: _Writer, node: fx.Node) -> None:
    writer.add("RESHAPE", node, [writer.of(node.args[0]), writer.numbers(_shape(node))], newShape=list(_shape(node)))


def _same(writer: _Writer, node: fx.Node) -> None:
    writer.tensors[node] = writer.of(node.args[0])


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["tensor_meta"].shape)


def _stored(shape: Sequence[int]) -> list[int]:
    return [shape[axis] for axis in CHANNEL_AXIS] if len(shape) == 4 else list(shape)


KINDS: dict[Any, Callable[[_Writer, fx.Node], None]] = {
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
    operator.add: _sum,
    operator.getitem: _every_other,
    F.pad: _new_channels,
    F.adaptive_avg_pool2d: _average,
    torch.flatten: _flat,
    nn.Dropout: _same,
    nn.Identity: _same,
}
