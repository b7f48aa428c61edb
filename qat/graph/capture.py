"""A model's graph in its present mode, compared with the model."""

import keyword
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from qat.contexts import warnings_ignored
from qat.graph.exporting import Captured, export
from qat.graph.in_place import Memory, drop_unread
from qat.graph.nodes import FACTS, Facts
from qat.graph.operators import PYTHONS
from qat.graph.patches import capturing_alone, without_fast_path
from qat.graph.randomness import python_state, seeded
from qat.graph.side_effects import CaptureError, LostStateError, changed_by_mode, is_equal, restoring_state, state_of
from qat.inputs import Examples, call_with, copied
from qat.text import first_line
from qat.torch_internals import buffers_of, children_of, has_backward_hooks, parameters_of, pytree

log = logging.getLogger("qat")

DRAWS = "forward draws from Python's or numpy's random numbers, which a graph does not keep"


def check_modules(model: nn.Module, graph_class: type[fx.GraphModule]) -> None:
    """Refuse modules whose behavior a graph would lose, and names that it cannot use."""
    # A graph module has methods that a plain module lacks, such as `graph` and `recompile`.
    taken = {*dir(graph_class(nn.Module(), fx.Graph())), "self"} - set(dir(nn.Module()))
    words = {word for word in taken if word in {**children_of(model), **parameters_of(model), **buffers_of(model)}}
    paths = [name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())]
    words |= {name for name in paths if any(map(keyword.iskeyword, name.split(".")))}
    if words:
        raise CaptureError(f"the name {min(words)!r} is reserved in a graph; rename it to have one graph")
    if type(model).__call__ is not nn.Module.__call__:  # it would run before forward
        raise CaptureError(f"{type(model).__name__} overrides __call__, which a graph does not run; use forward")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{name} is a torch.jit.ScriptModule, into which a graph cannot look")
        shown = name or type(model).__name__
        changed = changed_by_mode(module)
        if changed is not None:
            raise CaptureError(
                f"{shown} overrides train() or eval(), which changes {changed}, and a graph does not keep that; to go"
                f" without it, set {type(module).__name__}.train = nn.Module.train before"
            )
        if has_backward_hooks(module) and any(True for _ in module.children()):
            raise CaptureError(f"{shown} carries backward hooks, which a graph does not keep")


def graph_of(model: nn.Module, examples: Examples, allowed: tuple[str, ...]) -> Captured:
    """Return the model's graph in its present mode.

    Raises:
        CaptureError: if it cannot be captured, or if the graph answers otherwise than the model.
    """
    with capturing_alone, seeded(0):
        before = python_state()
        captured = export(model, examples, allowed)
        draws = python_state() != before
    drop_unread(captured.graph, model, keep_modules=True)
    memory = Memory(model, captured.graph)
    for node in captured.graph.nodes:  # x += y makes a new tensor where no node sees the difference
        name = str(node.target)
        written = node.op == "call_method" and name.endswith("_") and name.removesuffix("_") in PYTHONS
        if written and len(node.args) == 2 and not node.kwargs and memory.is_unseen(node):
            node.op, node.target = "call_function", PYTHONS[name[:-1]]
    check_answer(model, examples, captured.graph, draws)
    if captured.asks_layout:
        try:
            check_answer(model, pytree.tree_map(_laid_out_otherwise, examples), captured.graph)
        except CaptureError as error:
            raise CaptureError("forward asks a tensor for its layout in memory, which a graph does not keep") from error
    return captured


def _laid_out_otherwise(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.dim() < 2 or not x.is_contiguous():
        return x.contiguous() if isinstance(x, torch.Tensor) else x
    axis = min(1, x.dim() - 2)  # channels go last
    return x.movedim(axis, -1).contiguous().movedim(-1, axis)


class _Noting(fx.Interpreter):
    def __init__(self, model: nn.Module, graph: fx.Graph, examples: Examples) -> None:
        super().__init__(fx.GraphModule(model, graph))
        self.extra_traceback = False  # an error is one sentence
        self.examples = copied(examples)

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Any:
        return self.examples.get(target.lstrip("*"), args[0] if args else None)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta[FACTS] = Facts.of(value)
        return value


def check_answer(
    model: nn.Module, examples: Examples, graph: fx.Graph, draws: bool = False, owner: nn.Module | None = None
) -> None:
    """Note the facts of a graph's nodes; refuse a graph that differs from the model.

    A forward that counts its calls or draws numbers in Python is refused too. The modules that the graph calls, of the
    model or of an `owner` that shares them, run in evaluation.
    """
    owner = owner or model

    def run() -> Any:
        with seeded(1), torch.no_grad(), without_fast_path(), warnings_ignored(), _called_in_evaluation(owner, graph):
            before = python_state()
            answer = call_with(model, examples)
            return answer, python_state() != before

    buffers = dict(model.named_buffers())  # a snapshot: a buffer that is another object afterwards was reassigned
    with restoring_state(model) as changes:
        expected, draws_again = run()
        assigned = [
            name
            for name, x in model.named_buffers()
            if buffers.get(name, x) is not x and not is_equal(buffers[name], x)
        ]
    if assigned:
        raise LostStateError(
            f"forward assigns to the buffer {assigned[0]}, which a graph does not keep; .copy_() writes into it"
        )
    if draws and draws_again:  # both, since another thread may have drawn during one of them
        raise CaptureError(DRAWS)
    settled = [change.name for change in changes if not change.holds_tensor]
    if settled and (counted := _unsettled(model, settled, run)):
        raise CaptureError(f"forward reads and changes {counted}, which a graph does not keep")
    if model.training and (lost := [each.name for each in changes if each.holds_tensor]):
        log.warning(
            "forward of %s writes %s, which a prepared model does not keep: let it return what others read of it",
            type(model).__name__, ", ".join(lost),
        )  # fmt: skip
    try:
        with seeded(1), torch.no_grad(), restoring_state(model), _called_in_evaluation(owner, graph):
            answer = _Noting(owner, graph, examples).run()
    except Exception as error:
        raise CaptureError(f"its graph does not run: {first_line(error)}") from error
    if not _are_same(answer, expected):
        raise CaptureError("its graph and the model return different outputs for the example inputs")


def _unsettled(model: nn.Module, names: list[str], run: Callable[[], Any]) -> str:
    # The first attribute that a second run changes again; "" if it stays, as a cache does.
    with restoring_state(model):
        first, left = run()[0], copied({name: state_of(model).get(name) for name in names})
        second, after = run()[0], copied({name: state_of(model).get(name) for name in names})
    changed = names if not _are_same(first, second) else [n for n in names if not is_equal(left[n], after[n])]
    return next(iter(changed), "")


@contextmanager
def _called_in_evaluation(model: nn.Module, graph: fx.Graph) -> Iterator[None]:
    # Forward, which may ask a module for its mode, still sees the model's.
    training = model.training

    def before(module: nn.Module, *_: object) -> None:
        module.eval()

    def after(module: nn.Module, *_: object) -> None:
        module.train(training)

    with ExitStack() as hooks:
        for module in {model.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}:
            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after, always_call=True).remove)  # after errors too
        yield


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _are_close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    # Sums in another order are off by a share of the largest value, however small this one is.
    size = max(1.0, theirs.abs().nan_to_num(posinf=0).amax().item()) if theirs.numel() else 1.0
    return torch.allclose(ours, theirs, 1e-3, 1e-5 * size, equal_nan=True)


def _are_same(ours: object, theirs: object) -> bool:
    left, right = (
        [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in (ours, theirs)
    )
    return len(left) == len(right) and all(
        a.shape == b.shape and (a.is_meta or _are_close(_wide(a), _wide(b))) for a, b in zip(left, right, strict=True)
    )
