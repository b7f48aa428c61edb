"""One trace of a model in its present mode, which answers as the model does and leaves it as it was."""

import copy
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from qat.preparation.constants import attribute
from qat.preparation.examples import Examples, call_with
from qat.preparation.hints import torch_takes_proxies
from qat.preparation.nodes import FACTS, Facts
from qat.preparation.tracing import QuantTracer, first_line, is_foreign


class UntraceableError(ValueError):
    """A model, or a submodule, that has no one graph; the message says why."""


@contextmanager
def remembering(model: nn.Module) -> Iterator[None]:
    """A context after which every module remembers what it did before: a forward may note things, here proxies."""
    notes = [(module, {key: copy.copy(value) for key, value in _plain(module).items()}) for module in model.modules()]
    try:
        yield
        for name, module in model.named_modules():
            for key, value in (*module._buffers.items(), *module._parameters.items()):
                if type(value) is not nn.Parameter and issubclass(type(value), fx.Proxy):
                    raise UntraceableError(
                        f"forward replaces {f'{name}.{key}'.lstrip('.')}, which a graph does not keep"
                    )
    finally:
        for module, before in notes:
            for key in _plain(module):
                if key not in before and not key.startswith("_tensor_constant"):
                    del module.__dict__[key]
            module.__dict__.update(before)


def _plain(module: nn.Module) -> dict[str, Any]:
    own = {"_modules", "_parameters", "training"}
    return {
        key: value
        for key, value in vars(module).items()
        if key not in own and (key == "_buffers" or isinstance(value, (list, dict, tuple, int, float, str, type(None))))
    }


def check_modules(model: nn.Module) -> None:
    """Refuse modules whose behaviour a graph would lose.

    Raises:
        UntraceableError: naming the module.
    """
    for name, module in model.named_modules():
        if type(module).train is not nn.Module.train:
            raise UntraceableError(f"{name or type(model).__name__} overrides train(), which a graph does not keep")
        hooked = module._backward_hooks or module._backward_pre_hooks
        if hooked and any(True for _ in module.children()):
            raise UntraceableError(
                f"{name or type(model).__name__} carries backward hooks, which a graph does not keep"
            )


def graph_of(model: nn.Module, examples: Examples | None, compare: bool = True) -> tuple[fx.Graph, dict[str, str]]:
    """The model's graph in its present mode, and the functions that could not be taken apart, name to reason.

    Args:
        model: in training or in evaluation.
        examples: arguments of forward by name, or None.
        compare: hold the graph's answer against the model's.

    Raises:
        UntraceableError: if torch.fx cannot trace the model, or its graph answers the examples otherwise.
    """
    tracer = QuantTracer(examples)
    try:
        with torch.random.fork_rng(devices=[]), torch_takes_proxies(), remembering(model):
            torch.manual_seed(0)
            graph = tracer.trace(model)
        if examples is not None and compare:
            _check_answer(model, examples, tracer.answer(graph))
    except Exception as error:
        for name in [name for name in vars(model) if name.startswith("_tensor_constant")]:
            delattr(model, name)
        raise UntraceableError(f"torch.fx cannot trace {type(model).__name__}: {first_line(error)}") from error
    graph._tracer_cls = QuantTracer  # what unpickling traces with
    for node in graph.nodes:
        if not is_foreign(node.target):  # torch.fx marks what a wrapped function returned, here an operation of its own
            node.meta.pop("is_wrapped", None)
        if node.op == "get_attr" and FACTS not in node.meta:  # constants that forward makes
            node.meta[FACTS] = Facts.of(attribute(model, str(node.target)))
    _merge_selections(graph)
    return graph, tracer.opaque


def _merge_selections(graph: fx.Graph) -> None:
    """One node for every item that is taken from a list or a mapping, so that it is quantized once."""
    taken: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not operator.getitem or node.meta.get(FACTS) is None:
            continue
        source, index = node.args
        if source.meta.get(FACTS, ()) is None and isinstance(index, (int, str)):
            first = taken.setdefault((source, index), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _check_answer(model: nn.Module, examples: Examples, traced: Any) -> None:
    """Refuse a graph that computes something else: some Python code sees a proxy and says nothing.

    Raises:
        UntraceableError: if the graph's answer to the example inputs is not the model's.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), remembering(model), torch_takes_proxies():
        torch.manual_seed(0)
        expected = call_with(model, examples)
    ours, theirs = (
        [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in (traced, expected)
    )
    same = len(ours) == len(theirs) and all(
        a.shape == b.shape and (a.is_meta or torch.allclose(a.double(), b.double(), 1e-3, 1e-5, equal_nan=True))
        for a, b in zip(ours, theirs, strict=True)
    )
    if not same:
        raise UntraceableError("its graph answers the example inputs otherwise than the model itself")
