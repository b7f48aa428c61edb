"""Which operations carry a grid through, which compute on quantized operands: the tables behind the placement."""

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.preparation.tracing import is_call

PASSING_MODULES = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.ChannelShuffle, nn.PixelShuffle, nn.PixelUnshuffle,
)  # fmt: skip
PASSING_FUNCTIONS = {
    F.max_pool1d, F.max_pool2d, F.max_pool3d, F.adaptive_max_pool2d, F.dropout, torch.flatten, torch.reshape,
    torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, operator.getitem,
    torch.channel_shuffle, torch.pixel_shuffle,
}  # fmt: skip
PASSING_METHODS = {
    "flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "chunk", "split",
    "expand", "clone", "t",
}  # fmt: skip

SPLITTING_FUNCTIONS = {torch.chunk, torch.split}
SPLITTING_METHODS = {"chunk", "split"}

COMPUTING_MODULES = (
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.SiLU, nn.GELU, nn.LeakyReLU, nn.Tanh, nn.ELU, nn.Mish, nn.PReLU,
)  # fmt: skip
COMPUTING_FUNCTIONS = {
    operator.add, operator.iadd, torch.add, operator.mul, operator.imul, torch.mul, operator.sub, operator.isub,
    torch.sub, operator.matmul, torch.matmul, torch.bmm, torch.cat, torch.concat, torch.stack, torch.mean,
    F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
    F.hardswish, F.hardsigmoid, F.silu, F.gelu, F.leaky_relu, F.sigmoid, torch.sigmoid, torch.tanh, F.interpolate,
}  # fmt: skip
COMPUTING_METHODS = {"add", "add_", "mul", "mul_", "sub", "sub_", "mean", "matmul", "bmm", "sigmoid", "tanh"}

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
    if node.target is operator.getitem and isinstance(node.args[1], int):
        # One of several results: on one grid only behind a split; another module's tuple holds different tensors.
        source = node.args[0]
        return isinstance(source, fx.Node) and is_call(source, (), SPLITTING_FUNCTIONS, SPLITTING_METHODS, graph_module)
    return is_call(node, PASSING_MODULES, PASSING_FUNCTIONS, PASSING_METHODS, graph_module)


def _pads_with_zero(node: fx.Node) -> bool:
    """Whether F.pad(x, pad, mode, value) adds nothing off the grid: zeros, or copies of the values."""
    arguments = {**dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)), **node.kwargs}
    return bool(arguments.get("mode", "constant") != "constant" or arguments.get("value") in (None, 0, 0.0))


def computes_on_grids(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Whether the operation runs in integers when its operands and its result are quantized."""
    return is_call(node, COMPUTING_MODULES, COMPUTING_FUNCTIONS, COMPUTING_METHODS, graph_module)
