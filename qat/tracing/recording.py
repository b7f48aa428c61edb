"""Traces a model in its present mode, checks the graph against it, and leaves the model unchanged."""

import keyword
import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from qat.inputs import Examples, call_with, copied
from qat.text import first_line
from qat.torch_internals import (
    GRAPH_CONSTANT,
    buffers_of,
    children_of,
    has_backward_hooks,
    parameters_of,
    pytree,
)
from qat.tracing.nodes import FACTS, Facts, attribute
from qat.tracing.patches import gradients_refused, torch_takes_proxies
from qat.tracing.randomness import NoDraws, python_state, seeded
from qat.tracing.side_effects import Change, UntraceableError, changed_by_mode, is_equal, restoring_state, state_of
from qat.tracing.tracer import QuantTracer, is_foreign

log = logging.getLogger("qat")

DRAWS = "forward draws from Python's or numpy's random numbers, which a graph does not keep"


def check_modules(model: nn.Module, graph_class: type[fx.GraphModule]) -> None:
    """Refuse modules whose behaviour a graph would lose, and names that a graph cannot use."""
    taken = {*dir(graph_class(nn.Module(), fx.Graph())), "self"} - set(dir(nn.Module()))
    words = {word for word in taken if word in {**children_of(model), **parameters_of(model), **buffers_of(model)}}
    paths = [name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())]
    words |= {name for name in paths if any(map(keyword.iskeyword, name.split(".")))}
    if words:
        raise UntraceableError(f"a graph has other uses for the name {min(words)!r}; rename it to have one graph")
    if type(model).__call__ is not nn.Module.__call__:
        raise UntraceableError(f"{type(model).__name__} overrides __call__, and a graph has its forward alone")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UntraceableError(f"{name} is a torch.jit.ScriptModule, into which a graph cannot look")
        shown = name or type(model).__name__
        changed = changed_by_mode(module)
        if changed is not None:
            raise UntraceableError(
                f"{shown} overrides train() or eval(), which changes {changed}, and a graph does not keep that; to go"
                f" without it, set {type(module).__name__}.train = nn.Module.train before"
            )
        if has_backward_hooks(module) and any(True for _ in module.children()):
            raise UntraceableError(f"{shown} carries backward hooks, which a graph does not keep")


def graph_of(model: nn.Module, examples: Examples | None) -> tuple[fx.Graph, dict[str, str]]:
    """The model's graph in its present mode, and the functions that it could not trace into, name to reason."""
    try:
        with torch.enable_grad():
            tracer = QuantTracer(examples)
            graph, draws = _traced(model, tracer)
        if examples is not None:
            _check_answer(model, examples, tracer, graph, draws)
        elif draws:  # another thread may have drawn meanwhile; with examples a second run tells
            raise UntraceableError(DRAWS)
    except Exception as error:
        for name in [name for name in vars(model) if name.startswith(GRAPH_CONSTANT)]:
            delattr(model, name)
        way = "" if examples is not None else "; with example_inputs, what depends on sizes can be traced"
        raise UntraceableError(f"torch.fx cannot trace {type(model).__name__}: {first_line(error)}{way}") from error
    for node in graph.nodes:
        if not is_foreign(node.target):  # torch.fx marks the results of a wrapped function, here its own operations
            node.meta.pop("is_wrapped", None)
        if node.op == "get_attr" and FACTS not in node.meta:  # constants that forward makes
            node.meta[FACTS] = Facts.of(attribute(model, str(node.target)))
    _merge_selections(graph)
    return graph, tracer.opaque


def _merge_selections(graph: fx.Graph) -> None:
    """Use one node for each item of a list or a mapping, so that it is quantized once."""
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


def _traced(model: nn.Module, tracer: QuantTracer) -> tuple[fx.Graph, bool]:
    """The graph, and whether forward drew from Python's or NumPy's generators."""
    with (
        seeded(0), torch_takes_proxies(), gradients_refused(lambda: tracer.is_paused),
        NoDraws(lambda: tracer.is_paused), restoring_state(model) as changes,
    ):  # fmt: skip
        before = python_state()
        graph = tracer.trace(model)
        draws = python_state() != before
    counted = [change for change in changes if not change.is_new and change.proxy is None]
    lost = [each.name for each in changes if each.proxy is not None and each.proxy.node.meta.get(FACTS) is not None]
    if lost and model.training:  # once, and not for evaluation again
        log.warning(
            "forward of %s writes %s, which a prepared model does not keep: let it return what others read of it",
            type(model).__name__, ", ".join(lost),
        )  # fmt: skip
    if counted and tracer.examples is None:
        raise UntraceableError(f"forward changes {counted[0].name}, which a graph does not keep")
    return graph, draws


def _check_answer(model: nn.Module, examples: Examples, tracer: QuantTracer, graph: fx.Graph, draws: bool) -> None:
    """Refuse a graph that computes something else: Python code may treat a proxy wrongly, draw numbers, or count calls.

    The model runs with another random seed, and the modules that the graph calls in evaluation, as for its output.
    """

    def run() -> Any:
        with seeded(1), torch.no_grad(), torch_takes_proxies(), _called_in_evaluation(model, graph):
            before = python_state()
            answer = call_with(model, examples)
            return answer, python_state() != before

    with restoring_state(model) as changes:
        expected, draws_again = run()
    if draws and draws_again:  # both, since another thread may have drawn during one of them
        raise UntraceableError(DRAWS)
    if changes and (counted := _unsettled(model, changes, run)):
        raise UntraceableError(f"forward reads and changes {counted}, which a graph does not keep")
    if not _are_same(tracer.answer(graph), expected):
        with seeded(1), torch_takes_proxies(), restoring_state(model):
            replayed = tracer.replay(graph)
        if not _are_same(replayed, expected):
            raise UntraceableError("its graph answers the example inputs otherwise than the model itself")


def _unsettled(model: nn.Module, changes: list[Change], run: Callable[[], Any]) -> str:
    """The first attribute that a second run changes again; "" if it finds what the first left, as a log or a cache."""
    names = [change.name for change in changes]
    with restoring_state(model):
        (first, _), left = run(), state_of(model)
        left = {name: copied(left.get(name)) for name in names}
        (second, _), after = run(), state_of(model)
    changed = names if not _are_same(first, second) else [n for n in names if not is_equal(left[n], after.get(n))]
    return next(iter(changed), "")


@contextmanager
def _called_in_evaluation(model: nn.Module, graph: fx.Graph) -> Iterator[None]:
    """A context in which the modules that a graph calls run in evaluation, and otherwise show their own mode."""
    training = model.training

    def before(module: nn.Module, *_: Any) -> None:
        module.eval()

    def after(module: nn.Module, *_: Any) -> None:
        module.train(training)

    with ExitStack() as hooks:
        for module in {model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}:
            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _are_same(ours: Any, theirs: Any) -> bool:
    left, right = (
        [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in (ours, theirs)
    )
    return len(left) == len(right) and all(
        a.shape == b.shape and (a.is_meta or torch.allclose(_wide(a), _wide(b), 1e-3, 1e-5, equal_nan=True))
        for a, b in zip(left, right, strict=True)
    )
