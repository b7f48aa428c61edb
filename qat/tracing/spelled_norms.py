"""BatchNorms that forward spells out, as `F.batch_norm` of a module's own tensors, become calls of that module.

Libraries write norms with an activation inside as a subclass of nn.BatchNorm2d: its forward counts the batch, calls
`F.batch_norm`, and then its children. As a call of the norm, behind which its children run, it folds as any other.
"""

import operator
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from qat.torch_internals import ASSERTION
from qat.tracing.nodes import given_by_name

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TENSORS = ("running_mean", "running_var", "weight", "bias")
ARGUMENTS = ("input", *TENSORS, "training", "momentum", "eps")


def spelled_out(model: nn.Module, graph: fx.Graph, training: bool) -> dict[str, list[fx.Node]]:
    """The norms whose every application in the graph of one mode is what `nn.BatchNorm2d.forward` does.

    Returns:
        Name of the norm to the nodes that apply it and, in training, those that count the batches.
    """
    found: dict[str, list[fx.Node]] = {}
    counted: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if node.target is F.batch_norm:
            found.setdefault(_norm_of(node, model, training), []).append(node)
        elif node.op == "call_method" and node.target == "add_" and node.args[1:] == (1,) and not node.users:
            owner, _, name = str(getattr(source, "target", "")).rpartition(".")
            if name == "num_batches_tracked" and isinstance(source, fx.Node) and source.op == "get_attr":
                counted.setdefault(owner, []).append(node)
    found.pop("", None)
    steps = {name: len(applied) * training for name, applied in found.items()}
    return {
        name: applied + counted.get(name, [])
        for name, applied in found.items()
        if len(counted.get(name, [])) == steps[name]
    }


def _norm_of(node: fx.Node, model: nn.Module, training: bool) -> str:
    """The name of the norm that would do the same when it is called; "" if there is none."""
    given: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    given |= given_by_name(node, ARGUMENTS)
    owner = str(getattr(given["running_mean"], "target", "")).rpartition(".")[0]
    norm = dict(model.named_modules()).get(owner) if owner else None
    if not isinstance(norm, NORMS) or not norm.track_running_stats:
        return ""
    reads = all(
        (value is None and getattr(norm, name) is None)
        or (isinstance(value, fx.Node) and value.op == "get_attr" and value.target == f"{owner}.{name}")
        for name, value in ((name, given[name]) for name in TENSORS)
    )
    numbers = given["training"], given["momentum"], given["eps"]
    return owner if reads and numbers == (training, norm.momentum, norm.eps) else ""


def call_norm(graph: fx.Graph, name: str, nodes: list[fx.Node]) -> None:
    """Replace what `spelled_out` found of a norm by calls of its module."""
    for node in nodes:
        read = node.all_input_nodes
        if node.target is F.batch_norm:
            x = given_by_name(node, ARGUMENTS)["input"]
            node.op, node.target, node.args, node.kwargs = "call_module", name, (x,), {}
            _drop_axes_check(graph, x)
        else:
            graph.erase_node(node)
        for source in read:
            if source.op == "get_attr" and not source.users:
                graph.erase_node(source)


def _drop_axes_check(graph: fx.Graph, x: fx.Node) -> None:
    """Remove `assert x.ndim == 4`: the norm checks that itself, and a layer folds its only reader."""
    for axes in list(x.users):
        if axes.target is getattr and axes.args[1] == "ndim":
            for compared in list(axes.users):
                asserted = list(compared.users)
                if compared.target is operator.eq and all(node.target is ASSERTION for node in asserted):
                    for node in (*asserted, compared):
                        graph.erase_node(node)
            if not axes.users:
                graph.erase_node(axes)


def make_plain(norm: nn.Module) -> None:
    """Let a norm that is called by a graph apply itself alone; the graph calls its children behind it."""
    norm.__class__ = next(kind for kind in type(norm).__mro__ if kind in NORMS)
