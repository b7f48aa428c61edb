"""Compares a fused training step with the plain one, on a slice of a batch.

It asks two questions. Is the fused graph wired correctly? It runs with torch's own operations in place of every kernel,
and outputs, gradients and running statistics have to be those of the plain graph. Is every kernel correct? Each gets
the inputs that it has in that run, and is compared with torch's operations (`local`). So the roundings of one kernel do
not hide an error of another, and the wrong part has a name.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from qat.codes.check.local import ValueAndCodes, compare_computing, compare_quantizing
from qat.codes.check.training_step import (
    NoGradientsError,
    Results,
    copied,
    detached,
    difference,
    training_step,
    unseen_by_hooks,
)
from qat.codes.operators.add import before_sum, quantize_sum
from qat.codes.operators.codes import Codes, PreQuantizer
from qat.codes.operators.curves import before_curve, before_softmax, quantize_curve, quantize_softmax
from qat.codes.operators.matmul import matmul
from qat.codes.operators.norm import before_chain, quantize_chain
from qat.codes.operators.pool import max_pool
from qat.codes.operators.product import multiply
from qat.codes.operators.quantize import decode, drop, encode, reshape, reshape_by, shape_of
from qat.codes.operators.repair import repair
from qat.codes.training.rewriting import fused_graph
from qat.codes.verdict import Verdict
from qat.collectives import this_rank_alone
from qat.graph.randomness import rewinding
from qat.kernels import passes_values
from qat.kernels.cpu.quantizers import NO_CLIP
from qat.quantizer import Quantizer
from qat.text import first_line
from qat.torch_internals import AnyBatchNorm, pytree

_Given: TypeAlias = tuple[Any, ...]
_Function: TypeAlias = Callable[..., Any]

QUANTIZING: dict[_Function, Callable[..., PreQuantizer]] = {
    quantize_chain: before_chain,
    quantize_sum: before_sum,
    quantize_curve: before_curve,
    quantize_softmax: before_softmax,
}
"""Functions that end in a quantizer, their first module, with what runs before it."""

COMPUTING = {multiply, matmul, max_pool}
"""Functions that compute with codes, or with torch's operations if given floats."""

MOVING = {encode, decode, drop, reshape, reshape_by, shape_of, repair}
"""Functions that change no value."""

MOST_CHECKS = 4
"""Rounds of leaving parts out after which the whole model trains plainly."""

SAMPLES = 2
"""Size of the slice: the fewest for a BatchNorm's statistics; else one is enough."""


def judge(model: fx.GraphModule, args: tuple[object, ...], kwargs: dict[str, object]) -> Verdict | None:
    """Find out what of a model may train on codes: all of it, or what is left.

    What is left lacks the kernels that are wrong. Both steps compute in float32, under autocast too. Returns None if
    copies of the model cannot run on a slice of the batch: for an error, short memory, or in inference mode.
    """
    if torch.is_inference_mode_enabled():
        return None
    distrusted: tuple[str, ...] = ()
    reason = ""
    try:
        in_float32 = torch.autocast(next(model.parameters()).device.type, enabled=False)
        with rewinding() as rewind, unseen_by_hooks(), this_rank_alone(), in_float32:
            base = copied(model)
            bound = inspect.signature(model.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            sample = _sampled(base, list(bound.arguments.values()), rewind)
            if sample is None:
                return None
            for _ in range(MOST_CHECKS):
                graph = fused_graph(base, distrusted)
                rewind()
                found = Verdict() if graph is None else _check(base, graph, *sample)
                reason = reason or found.reason
                if not found.distrusted:
                    return Verdict(None if found.distrusted is None else distrusted, reason)
                distrusted += found.distrusted  # the next round leaves them out
                base = copied(model)  # the step moved its running statistics
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # it cannot be copied, or it has no gradients
        return Verdict(None, f"no step of it can be run apart, {_described(error)}")
    return Verdict(None, reason)


def _check(
    model: fx.GraphModule, graph: fx.Graph, inputs: list[object], batch_factor: int, expected: Results
) -> Verdict:
    checking = _Checking(model, graph, batch_factor)
    try:
        found = training_step(checking, inputs)
    except torch.OutOfMemoryError:  # no fault of the model's: there is no verdict
        raise
    except Exception as error:  # whatever it is, the plain graph runs
        return Verdict(None, f"{checking.last or 'its fused step'} raises {_described(error)}")
    if checking.wrong:
        names = tuple(dict.fromkeys(name for name, _ in checking.wrong))
        return Verdict(None if "" in names else names, checking.wrong[0][1])
    wrong = difference(expected, found)
    return Verdict() if wrong is None else Verdict(None, f"its fused step differs from the plain one: {wrong}")


def _described(error: BaseException) -> str:
    cause = (error.__cause__ or error) if isinstance(error, NoGradientsError) else error
    return f"{type(cause).__name__}: {first_line(cause) if str(cause) else ''}"


def _sampled(
    model: fx.GraphModule, given: list[object], rewind: Callable[[], None]
) -> tuple[list[object], int, Results] | None:
    # A slice of the batch, how many such slices the batch has, and the plain step on it.
    lengths = {len(leaf) for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor) and leaf.dim()}
    whole = lengths.pop() if len(lengths) == 1 else 0
    few = SAMPLES if any(isinstance(module, AnyBatchNorm) for module in model.modules()) else 1
    for count in (few, whole) if few < whole else (whole,):  # the whole batch if the model does not run on a slice
        inputs = pytree.tree_map(detached, given)
        if count < whole:
            inputs = pytree.tree_map(lambda x: detached(x[:few]) if isinstance(x, Tensor) and x.dim() else x, given)
        rewind()
        try:
            expected = training_step(fx.Interpreter(copied(model), graph=model.graph), inputs)
            return inputs, max(1, -(-whole // max(count, 1))), expected
        except NoGradientsError:
            if count == whole:
                raise
        except Exception:  # it takes no slices, or the model is wrong itself, and its forward will say so
            continue
    return None


class _Checking(fx.Interpreter):
    # It runs the fused graph with torch's operations, and next to them every function on codes.

    def __init__(self, model: nn.Module, graph: fx.Graph, batch_factor: int) -> None:
        super().__init__(model, graph=graph)
        self.batch_factor = batch_factor
        self.wrong: list[tuple[str, str]] = []  # modules that kernels may not replace ("" if there is none), and why
        self.last = ""  # the name of what ran last

    def run_node(self, n: fx.Node) -> object:
        """Return the node's value, and note what is wrong with a function on codes."""
        function: Any = n.target
        if n.op != "call_function" or function not in {*QUANTIZING, *COMPUTING, *MOVING}:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        floats: Any = pytree.tree_map(_value, (args, kwargs), is_leaf=_is_pair)
        names = [str(source.target) for source in n.all_input_nodes if source.op == "get_attr"]
        self.last = names[0] if names else n.name
        if function in QUANTIZING:
            return self._quantized(function, args, floats[0], names)
        if function in COMPUTING:
            return self._computed(function, args, floats[0], names)
        value = floats[0][0] if function is encode else function(*floats[0], **floats[1])
        if function is encode and not _is_pair(args[0]):
            return _with_codes(value, encode(value.detach(), *args[1:]), args[1])
        drops = function is drop and args[1].training and args[1].p > 0  # run it once: a second run draws other numbers
        if function is decode or drops or not args or not _is_pair(args[0]):
            return value
        return _with_codes(value, function(args[0].codes, *args[1:], **kwargs), args[0].quantizer)

    def _quantized(self, function: _Function, args: _Given, floats: _Given, names: list[str]) -> object:
        quantizer = next(each for each in args if isinstance(each, Quantizer))
        path = next(name for name in names if self.fetch_attr(name) is quantizer)
        self._note(path, compare_quantizing(function, QUANTIZING[function], args, path))
        value = quantizer(QUANTIZING[function](*floats).z)
        if function is quantize_chain:
            x, _, norm, floor, ceiling, *_ = args
            if isinstance(x, Tensor) and not x.requires_grad and norm is None and (floor, ceiling) == NO_CLIP:
                return _with_codes(value, function(*args), quantizer)  # an input's codes carry their source
        return _with_codes(value, encode(value.detach(), quantizer), quantizer)

    def _computed(self, function: _Function, args: _Given, floats: _Given, names: list[str]) -> object:
        coded = [each for each in args if isinstance(each, ValueAndCodes)]
        path = names[0] if names else ""
        on_values = function is multiply and passes_values(floats[1])  # a GPU's kernels pass values on, and no codes
        if coded or on_values:
            run = functools.partial(function, batch_factor=self.batch_factor) if function is multiply else function
            self._note(path, compare_computing(run, args, path or function.__name__))
        value = function(*floats)
        if not coded or function is not max_pool:
            return value
        return _with_codes(value, encode(value.detach(), coded[0].quantizer), coded[0].quantizer)

    def _note(self, path: str, wrong: str | None) -> None:
        if wrong is not None:
            self.wrong.append((path, wrong))


def _with_codes(value: Tensor, codes: Codes | Tensor, quantizer: Quantizer) -> ValueAndCodes | Tensor:
    return ValueAndCodes(value, codes, quantizer) if isinstance(codes, Codes) else value


def _is_pair(x: object) -> bool:
    return isinstance(x, ValueAndCodes)


def _value(x: object) -> object:
    return x.value if isinstance(x, ValueAndCodes) else x
