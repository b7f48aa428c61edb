"""What the table of operations says of a node: it passes a grid on, or computes on it."""

import math
import operator
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.graph.in_place import written_by
from qat.graph.nodes import FACTS, WRITTEN_LATER, dimensions, given_by_name, is_call, submodule_of
from qat.graph.operations import CLIPS, DROPOUTS, PRODUCTS, Calls, calls_of, calls_where
from qat.quantizer import Quantizer
from qat.targets.profile import Operation

SPLITTING, _KEEPING = calls_of("split"), calls_of("move", "split", "max", "dropout")
PASSING = _KEEPING._replace(functions=_KEEPING.functions - DROPOUTS.functions | {F.dropout})  # the rest is always on
MAX_POOLS = calls_where(lambda row: row.kind == "max" and nn.AdaptiveMaxPool2d not in row.modules)


def is_relu(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if the operation only clips, and so belongs to its producer."""
    return is_call(node, *CLIPS, graph_module)


def passes_grid(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if all output values lie on the grid of the first input."""
    clones = node.target == "clone" or node.target is torch.clone
    if any(each.meta.get(WRITTEN_LATER) for each in (node, *(node.all_input_nodes if clones else ()))):
        return False
    if node.target is F.pad:
        return _keeps_grid(node, graph_module)
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
    return is_call(node, *PASSING, graph_module)


def is_split(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if a tensor is split, and its pieces alone are read, one by one."""
    pieces = (user.target is operator.getitem and isinstance(user.args[1], int) for user in node.users)
    return is_call(node, *SPLITTING, graph_module) and all(pieces)


def _keeps_grid(pad: fx.Node, graph_module: fx.GraphModule) -> bool:
    arguments = given_by_name(pad, ("input", "pad", "mode", "value"))
    if arguments.get("value") == -math.inf:  # which no maximum chooses
        return all(is_call(user, *MAX_POOLS, graph_module) for user in pad.users)
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
