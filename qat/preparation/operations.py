"""Which operations carry a grid through, which compute on quantized operands: the tables behind the placement."""

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.preparation.nodes import FACTS, is_call

PASSING_MODULES = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.ChannelShuffle, nn.PixelShuffle, nn.PixelUnshuffle,
)  # fmt: skip
PASSING_FUNCTIONS = {
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.adaptive_max_pool2d, F.dropout, torch.flatten, torch.reshape,
    torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, operator.getitem,
    torch.channel_shuffle, torch.pixel_shuffle, torch.roll, torch.unflatten, torch.swapaxes, torch.movedim,
    torch.select, torch.narrow, torch.clone, torch.repeat_interleave,
}  # fmt: skip
PASSING_METHODS = {
    "flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "chunk", "split",
    "expand", "clone", "t", "unflatten", "swapaxes", "roll", "repeat", "select", "narrow", "movedim",
    "repeat_interleave",
}  # fmt: skip

SPLITTING_FUNCTIONS = {torch.chunk, torch.split}
SPLITTING_METHODS = {"chunk", "split"}

PRODUCT_FUNCTIONS = {operator.matmul, torch.matmul, torch.bmm, torch.mm, torch.einsum}
PRODUCT_METHODS = {"matmul", "bmm", "mm", "__matmul__"}

JOINING_FUNCTIONS = {
    operator.add, operator.iadd, torch.add, operator.mul, operator.imul, torch.mul, operator.sub, operator.isub,
    torch.sub, torch.cat, torch.concat, torch.stack,
}  # fmt: skip
JOINING_METHODS = {"add", "add_", "mul", "mul_", "sub", "sub_"}

AVERAGING_MODULES = (
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.Upsample,
)  # fmt: skip
AVERAGING_FUNCTIONS = {
    torch.mean, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d, F.interpolate,
}  # fmt: skip
AVERAGING_METHODS = {"mean"}

RELU_MODULES = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
RELU_FUNCTIONS = {F.relu, F.relu_, torch.relu, F.relu6, F.hardtanh, torch.clamp}
RELU_METHODS = {"relu", "relu_", "clamp", "clamp_"}


def is_relu(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Whether the operation only clips: it belongs to its producer, since a grid clips anyway."""
    return is_call(node, RELU_MODULES, RELU_FUNCTIONS, RELU_METHODS, graph_module)


def passes_grid(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Whether the output's values all stand on the grid of the first input: reshaping, selecting, max pooling."""
    if node.target is F.pad:
        return _pads_with_zero(node)
    if node.target is operator.getitem:
        source, index = node.args
        several = not isinstance(source, fx.Node) or source.meta.get(FACTS, ()) is None
        if several or isinstance(index, (int, str)):
            # One of several results: on one grid only behind a split; else they are different tensors. An index into
            # a tensor counts too: the q, k and v of one projection get a grid each.
            return isinstance(source, fx.Node) and _splits(source, graph_module)
    return is_call(node, PASSING_MODULES, PASSING_FUNCTIONS, PASSING_METHODS, graph_module)


def _splits(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    return is_call(node, (), SPLITTING_FUNCTIONS, SPLITTING_METHODS, graph_module)


def _pads_with_zero(node: fx.Node) -> bool:
    """Whether F.pad(x, pad, mode, value) adds nothing off the grid: zeros, or copies of the values."""
    arguments = {**dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)), **node.kwargs}
    return bool(arguments.get("mode", "constant") != "constant" or arguments.get("value") in (None, 0, 0.0))


def is_product(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Whether the operation multiplies matrices: it runs in integers when its operands are quantized."""
    return is_call(node, (), PRODUCT_FUNCTIONS, PRODUCT_METHODS, graph_module)


def is_joining(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Whether the operation joins several tensors: integers if all of them and its result are quantized."""
    return is_call(node, (), JOINING_FUNCTIONS, JOINING_METHODS, graph_module)


def is_averaging(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Whether the operation takes averages of one tensor: integers if that and its result are quantized."""
    return is_call(node, AVERAGING_MODULES, AVERAGING_FUNCTIONS, AVERAGING_METHODS, graph_module)


def changes_in_place(node: fx.Node) -> bool:
    """Whether a node acts by writing into what it is given, so that its own result need not be read."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name == "setitem" or (name.endswith("_") and not name.endswith("__"))
