"""The engine proves itself on every model: a fused training step next to the plain one, on a slice of a real batch.

Two questions are asked. Is the fused graph wired right? It runs with torch's own operations in the place of every
kernel, and everything has to come out as from the plain graph: answers, gradients, running statistics. Is every kernel
right? Each is given what stood before it in that run, and is held to the same operations (`local_check`). So one
difference is not hidden by roundings of another, and the part that is wrong has a name.
"""

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from qat.layers.carrying import drop
from qat.layers.codes import Codes, decode, encode
from qat.layers.pools import max_pool
from qat.layers.products import multiply
from qat.preparation.activations import NO_CLIP
from qat.preparation.fused_graph import fused_graph
from qat.preparation.local_check import Both, compare_computing, compare_quantizing
from qat.preparation.references import COMPUTING, MOVING, QUANTIZING
from qat.preparation.verdict import Verdict
from qat.quantizer import Quantizer

MOST_CHECKS = 4
"""How often parts are left out before the whole model trains plainly."""

SAMPLES = 2
"""Of a batch: the fewest of which a BatchNorm has statistics; without one, a single sample is looked at."""


def is_wanted() -> bool:
    """Whether models are to be checked: unless QAT_SELF_CHECK=off says that they are trusted."""
    return os.environ.get("QAT_SELF_CHECK", "").lower() != "off"


def judge(model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict | None:
    """Find what of a model may train on codes: all of it, or what is left without the kernels that are wrong.

    Args:
        model: a prepared model in training.
        args, kwargs: of its forward.

    Returns:
        What was found; None where nothing can be.
    """
    distrusted: tuple[str, ...] = ()
    reason = ""
    for _ in range(MOST_CHECKS):
        graph = fused_graph(model, distrusted)
        found = Verdict() if graph is None else check(model, graph, args, kwargs)
        if found is None:
            return None
        reason = reason or found.reason
        if not found.distrusted:
            return Verdict(None if found.distrusted is None else distrusted, reason)
        distrusted += found.distrusted
    return Verdict(None, reason)


def check(model: fx.GraphModule, graph: fx.Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict | None:
    """Hold a fused graph to the plain one; the model is left as it was.

    Args:
        model: a prepared model in training.
        graph: derived from it.
        args, kwargs: of its forward; a slice of the batch is looked at.

    Returns:
        What was found; None where nothing can be: the plain graph does not run, or no gradients can be taken.
    """
    if torch.is_inference_mode_enabled():
        return None
    with _undisturbed(model):
        sample = _sample(model, _bound(model, args, kwargs))
        if sample is None:
            return None
        inputs, copies, expected = sample
        checking = _Checking(model, graph, copies)
        try:
            found = _step(checking, model, inputs)
        except Exception as error:  # whatever it is, the plain graph runs
            where = checking.last or "its fused step"
            return Verdict(
                None, f"{where} raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        if checking.wrong:
            names = tuple(dict.fromkeys(name for name, _ in checking.wrong))
            reason = checking.wrong[0][1]
            return Verdict(None if "" in names else names, reason)
        difference = _difference(expected, found)
    return Verdict() if difference is None else Verdict(None, difference)


def _bound(model: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments in the order of the graph's placeholders."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())


def _sample(model: fx.GraphModule, given: list[Any]) -> tuple[list[Any], int, "_Results"] | None:
    """A slice of a batch, how many of them the batch has, and the plain step on it; None if the model takes none."""
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor) and leaf.dim()]
    lengths = {len(tensor) for tensor in tensors}
    whole = lengths.pop() if len(lengths) == 1 else 0
    needs_two = any(isinstance(module, _BatchNorm) for module in model.modules())
    for count in (SAMPLES if needs_two else 1, whole):
        if count <= whole:
            inputs = pytree.tree_map(lambda x, count=count: _first(x, count), given)
            with contextlib.suppress(Exception):  # it only takes whole batches, or it is the model's own mistake
                return (
                    inputs,
                    -(-whole // max(count, 1)),
                    _step(fx.Interpreter(model, graph=model.graph), model, inputs),
                )
    return None


def _first(x: Any, count: int) -> Any:
    """The first samples of a tensor."""
    if not isinstance(x, Tensor):
        return x
    return (x[:count] if count and x.dim() else x).detach().clone().requires_grad_(x.requires_grad)


def _detached(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """A context that leaves no trace: buffers, random numbers, hooks that wait for calls or for saved tensors."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = list(model.modules())
    waiting = [{name: vars(module)[name] for name in hooks} for module in modules]
    notes = [
        {key: value for key, value in vars(module).items() if isinstance(value, (int, float, str, bool, type(None)))}
        for module in modules
    ]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with (
        torch.random.fork_rng(list(devices)),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        try:
            for module, found in zip(modules, waiting, strict=True):
                vars(module).update({name: type(hook)() for name, hook in found.items()})
            yield
        finally:
            for module, found, noted in zip(modules, waiting, notes, strict=True):
                vars(module).update(found)
                vars(module).update(noted)
            for buffer, before in buffers:
                buffer.data.copy_(before)


@dataclass
class _Results:
    answers: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _step(interpreter: fx.Interpreter, model: nn.Module, inputs: list[Any]) -> _Results:
    """One training step without the optimizer; buffers are put back, since the next one starts from the same."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    torch.manual_seed(0)
    wanted: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    copied = pytree.tree_map(_detached, inputs)
    leaves = [leaf for leaf in pytree.tree_leaves(copied) if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted |= {f"input {number}": leaf for number, leaf in enumerate(leaves)}
    # As of a tensor that something computed: the model may write into what it is given.
    copied = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, copied)
    answer = interpreter.run(*copied)
    answers = [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, Tensor)]
    loss = sum((_weights(y) * y).sum() for y in answers if y.requires_grad)
    gradients: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if isinstance(loss, Tensor):
        gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    found = {name: gradient for name, gradient in zip(wanted, gradients, strict=True) if gradient is not None}
    state = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    for buffer, value in before:
        buffer.data.copy_(value)
    return _Results([y.detach() for y in answers], found, state)


def _weights(y: Tensor) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(y.numel())
    return torch.randn(y.shape, generator=generator, device="cpu").to(y.device, y.dtype)


class _Checking(fx.Interpreter):
    """Runs a fused graph on values of the plain operations, and every function of it on codes beside them.

    Attributes:
        wrong: name of the module that a kernel does not stand in for from now on ("" if it has none), and why.
        last: what ran last.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, copies: int) -> None:
        super().__init__(model, graph=graph)
        self.copies = copies
        self.wrong: list[tuple[str, str]] = []
        self.last = ""

    def run_node(self, n: fx.Node) -> Any:
        """The node's value; of a function on codes also what is wrong with it."""
        if n.op != "call_function" or n.target not in {**QUANTIZING, **COMPUTING, **MOVING}:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        plain: Any = pytree.tree_map(_value, (args, kwargs), is_leaf=_is_both)
        names = [str(source.target) for source in n.all_input_nodes if source.op == "get_attr"]
        self.last = names[0] if names else n.name
        if n.target in QUANTIZING:
            return self._quantized(n.target, args, plain[0], names)
        if n.target in COMPUTING:
            return self._computed(n.target, args, plain[0], names)
        return self._moved(n.target, args, kwargs, plain)

    def _quantized(self, function: Any, args: Any, plain: Any, names: list[str]) -> Any:
        quantizer = next(each for each in args if isinstance(each, Quantizer))
        path = next(name for name in names if self.fetch_attr(name) is quantizer)
        self._note(path, compare_quantizing(function, QUANTIZING[function], args, path))
        value = quantizer(QUANTIZING[function](*plain).z)
        x, _, norm, *clip = (*args, None)[:5]
        if isinstance(x, Tensor) and not x.requires_grad and norm is None and tuple(clip) == NO_CLIP:
            codes = function(*args)  # of an input of the model, which know what they were made of
            return Both(value, codes, quantizer) if isinstance(codes, Codes) else value
        return _with_codes(value, quantizer)

    def _computed(self, function: Any, args: Any, plain: Any, names: list[str]) -> Any:
        coded = [each for each in args if isinstance(each, Both)]
        path = names[0] if names else ""
        if coded:
            run = functools.partial(function, copies=self.copies) if function is multiply else function
            self._note(path, compare_computing(run, COMPUTING[function], args, path or function.__name__))
        value = COMPUTING[function](*plain)
        return _with_codes(value, coded[0].quantizer) if coded and function is max_pool else value

    def _moved(self, function: Any, args: Any, kwargs: Any, plain: Any) -> Any:
        value = MOVING[function](*plain[0], **plain[1])
        if function is encode and not isinstance(args[0], Both):
            codes = encode(value.detach(), *args[1:])
            return Both(value, codes, args[1]) if isinstance(codes, Codes) else value
        drops = function is drop and args[1].training and args[1].p > 0  # once: another time draws other numbers
        if function is decode or drops or not args or not isinstance(args[0], Both):
            return value
        given, *rest = args
        codes = function(given.codes, *rest, **kwargs)
        return Both(value, codes, given.quantizer) if isinstance(codes, Codes) else value

    def _note(self, path: str, wrong: str | None) -> None:
        if wrong is not None:
            self.wrong.append((path, wrong))


def _with_codes(value: Tensor, quantizer: Quantizer) -> Any:
    """A tensor that lies on a grid, with its codes; as it is where kernels do not apply."""
    codes = encode(value.detach(), quantizer)
    return Both(value, codes, quantizer) if isinstance(codes, Codes) else value


def _is_both(x: Any) -> bool:
    return isinstance(x, Both)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Both) else x


def _difference(expected: _Results, found: _Results) -> str | None:
    """What the fused graph gives otherwise, with torch's operations in the place of all kernels."""
    if len(expected.answers) != len(found.answers):
        return f"{len(found.answers)} answers instead of {len(expected.answers)}"
    pairs = [("an answer", y, x) for y, x in zip(expected.answers, found.answers, strict=True)]
    for kind, ours, theirs in (
        ("the gradient of", expected.gradients, found.gradients), ("the buffer", expected.buffers, found.buffers)
    ):  # fmt: skip
        for name, tensor in ours.items():
            if name not in theirs:
                return f"{kind} {name} is missing"
            pairs.append((f"{kind} {name}", tensor, theirs[name]))
        extra = sorted(theirs.keys() - ours.keys())
        if extra:
            return f"{kind} {extra[0]} is there"
    norms = [float(tensor.double().nan_to_num().norm()) for tensor in expected.gradients.values()]
    floor = 1e-7 + 1e-5 * max(
        norms, default=0.0
    )  # the gradient of a bias in front of a BatchNorm is nothing but rounding
    for name, tensor, other in pairs:
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return f"{name} is {other.dtype} {tuple(other.shape)} instead of {tensor.dtype} {tuple(tensor.shape)}"
        if torch.equal(tensor, other):
            continue
        gap, size = (tensor.double() - other.double()).nan_to_num(), tensor.double().nan_to_num().norm()
        if not bool(torch.equal(tensor.isnan(), other.isnan())) or not float(gap.norm()) <= 1e-3 * float(size) + floor:
            return f"{name} differs by {float(gap.norm() / size):.2g} of its length"
    return None
