"""The tables behind placement: which operations pass a grid on, or compute on it."""

import math
import operator
from collections.abc import Mapping
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.graph.in_place import written_by
from qat.graph.nodes import FACTS, WRITTEN_LATER, dimensions, given_by_name, is_call, submodule_of
from qat.quantizer import Quantizer
from qat.targets.profile import Operation

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""Layers that keep values on their grid in evaluation, but not in training."""

MAX_POOL_MODULES = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
MAX_POOLS = {F.max_pool1d, F.max_pool2d, F.max_pool3d}
PASSING_MODULES = (
    *MAX_POOL_MODULES, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, nn.Flatten, nn.Unflatten,
    nn.Identity, *DROPOUTS, nn.ChannelShuffle, nn.PixelShuffle, nn.PixelUnshuffle,
)  # fmt: skip
MOVING_FUNCTIONS = {
    torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.squeeze, torch.unsqueeze, torch.chunk,
    torch.split, operator.getitem, torch.channel_shuffle, torch.pixel_shuffle, torch.roll, torch.unflatten,
    torch.swapaxes, torch.movedim, torch.select, torch.narrow, torch.clone, torch.repeat_interleave,
}  # fmt: skip
"""Functions that know nothing of values, and move bytes as well."""

PASSING_FUNCTIONS = {*MAX_POOLS, F.adaptive_max_pool2d, F.dropout, *MOVING_FUNCTIONS}
PASSING_METHODS = {
    "flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "chunk", "split",
    "expand", "clone", "t", "unflatten", "swapaxes", "roll", "repeat", "select", "narrow", "movedim",
    "repeat_interleave",
}  # fmt: skip

Calls: TypeAlias = tuple[tuple[type[nn.Module], ...], set[object], set[str]]
"""Modules, functions and tensor methods that do the same."""

SPLITTING: Calls = ((), {torch.chunk, torch.split}, {"chunk", "split"})

PRODUCTS: Calls = (
    (),
    {operator.matmul, torch.matmul, torch.bmm, torch.mm, torch.einsum},
    {"matmul", "bmm", "mm", "__matmul__"},
)

FLOAT_PRODUCTS = {
    torch.addmm, torch.addbmm, torch.baddbmm, torch.tensordot, torch.mv, torch.dot, F.bilinear, F.conv1d, F.conv2d,
    F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear, F.embedding, torch.embedding_bag,
}  # fmt: skip
"""Products that stay in float as functions; F.linear and F.conv of no parameter."""

JOINING: dict[Operation, Calls] = {
    "add": ((), {operator.add, torch.add}, {"add", "add_"}),
    "sub": ((), {operator.sub, torch.sub}, {"sub", "sub_"}),
    "mul": ((), {operator.mul, torch.mul}, {"mul", "mul_"}),
    "div": ((), {operator.truediv, torch.div}, {"div", "div_"}),
    "maximum": ((), {torch.maximum}, {"maximum"}),
    "minimum": ((), {torch.minimum}, {"minimum"}),
    "cat": ((), {torch.cat, torch.concat}, set()),
    "stack": ((), {torch.stack}, set()),
}
"""Operations on several tensors, in integers if operands and result are quantized."""

AVERAGING: dict[Operation, Calls] = {
    "avg_pool": (
        (
            nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
            nn.AdaptiveAvgPool3d,
        ),
        {
            F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d,
            F.adaptive_avg_pool3d,
        },
        set(),
    ),
    "mean": ((), {torch.mean}, {"mean"}),
    "interpolate": ((nn.Upsample,), {F.interpolate}, set()),
}  # fmt: skip
"""Linear operations on one tensor, in integers if it and the result are quantized."""

NONLINEAR: dict[Operation, Calls] = {
    "softmax": ((nn.Softmax,), {F.softmax, torch.softmax}, {"softmax"}),
    "log_softmax": ((nn.LogSoftmax,), {F.log_softmax, torch.log_softmax}, {"log_softmax"}),
    "sigmoid": ((nn.Sigmoid,), {F.sigmoid, torch.sigmoid}, {"sigmoid", "sigmoid_"}),
    "tanh": ((nn.Tanh,), {F.tanh, torch.tanh}, {"tanh", "tanh_"}),
    "hardsigmoid": ((nn.Hardsigmoid,), {F.hardsigmoid}, set()),
    "hardswish": ((nn.Hardswish,), {F.hardswish}, set()),
    "silu": ((nn.SiLU,), {F.silu}, set()),
    "gelu": ((nn.GELU,), {F.gelu}, set()),
    "elu": ((nn.ELU,), {F.elu}, set()),
    "mish": ((nn.Mish,), {F.mish}, set()),
    "leaky_relu": ((nn.LeakyReLU,), {F.leaky_relu}, set()),
    "prelu": ((nn.PReLU,), {F.prelu}, set()),
    "layer_norm": ((nn.LayerNorm,), {F.layer_norm}, set()),
    "group_norm": ((nn.GroupNorm,), {F.group_norm}, set()),
    "instance_norm": ((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), {F.instance_norm}, set()),
}
"""Operations in float between integers, unless the target has no float arithmetic."""

RELU_MODULES = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
RELU_FUNCTIONS = {
    F.relu, F.relu_, torch.relu, F.relu6, F.hardtanh, torch.clamp, torch.clip, torch.clamp_min, torch.clamp_max,
}  # fmt: skip
RELU_METHODS = {"relu", "relu_", "clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max"}


def is_relu(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if the operation only clips, and so belongs to its producer."""
    return is_call(node, RELU_MODULES, RELU_FUNCTIONS, RELU_METHODS, graph_module)


def passes_grid(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if all output values lie on the grid of the first input."""
    if node.meta.get(WRITTEN_LATER):
        return False
    if node.target is F.pad:
        return _keeps_grid(node, graph_module)
    clones = node.target == "clone" or node.target is torch.clone
    if clones and any(written_by(user, graph_module) is node for user in node.users):
        return False  # the clone becomes a different tensor
    if node.target is getattr:
        return node.args[1] in ("T", "mT")
    if node.target is operator.getitem:
        source, index = node.args
        several = not isinstance(source, fx.Node) or source.meta.get(FACTS, ()) is None
        if several or isinstance(index, (int, str)):
            # One of several results. They share a grid only after a split; otherwise they are different tensors. An
            # index into a tensor counts too: the q, k and v of one projection get a grid each.
            return isinstance(source, fx.Node) and is_call(source, *SPLITTING, graph_module)
    return is_call(node, PASSING_MODULES, PASSING_FUNCTIONS, PASSING_METHODS, graph_module)


def is_split(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if a tensor is split, and its pieces alone are read, one by one."""
    pieces = (user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)
    return is_call(node, *SPLITTING, graph_module) and all(pieces)


def _keeps_grid(pad: fx.Node, graph_module: fx.GraphModule) -> bool:
    arguments = given_by_name(pad, ("input", "pad", "mode", "value"))
    if arguments.get("value") == -math.inf:  # which no maximum chooses
        return all(is_call(user, MAX_POOL_MODULES, MAX_POOLS, (), graph_module) for user in pad.users)
    # other modes than "constant" copy the input's values, which lie on its grid
    return bool(arguments.get("mode", "constant") != "constant" or arguments.get("value") in (None, 0, 0.0))


def is_product(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if the operation multiplies matrices, as integers if it can."""
    return is_call(node, *PRODUCTS, graph_module)


def operation_of(node: fx.Node, graph_module: fx.GraphModule, table: Mapping[Operation, Calls]) -> Operation | None:
    """Return the name of a node's operation in a table, or None."""
    found = next((name for name, calls in table.items() if is_call(node, *calls, graph_module)), None)
    return "avg_pool" if found == "mean" and averages_pixels(node) else found


def averages_pixels(node: fx.Node) -> bool:
    """Return True if a mean is average pooling to one pixel, such as x.mean((2, 3))."""
    given = given_by_name(node, ("input", "dim", "keepdim"))
    axes = given.get("dim")
    if not isinstance(axes, (tuple, list)) or dimensions(node) != (4 if given.get("keepdim") else 2):
        return False
    return {axis % 4 for axis in axes if isinstance(axis, int)} == {2, 3} and "dtype" not in given


def producer_of(node: fx.Node, graph_module: fx.GraphModule) -> fx.Node:
    """Return the node that computed a tensor's values, before any that move them."""
    while passes_grid(node, graph_module) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def grid_of(node: fx.Node, graph_module: fx.GraphModule) -> fx.Node | None:
    """Return the node of the quantizer on whose grid a tensor lies, or None."""
    producer = producer_of(node, graph_module)
    return producer if isinstance(submodule_of(graph_module, producer), Quantizer) else None
