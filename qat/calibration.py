"""Calibration: the range of every activation from a few batches."""

import copy
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from qat.analysis.statistics import warn_of_losses
from qat.batch_norm import warn_of_young_norms
from qat.collectives import of_all_ranks, rank, reshard, take_from_first, this_rank_alone
from qat.contexts import evaluating, first_calls, in_full_precision
from qat.inputs import Batch, as_batches, inputs_and_labels, run_batch
from qat.layers import QuantFunction, QuantLayer
from qat.preparation.proof import check_own_twins, check_parts, traced_parts
from qat.quantizer import Quantizer, RangeObserver
from qat.text import check_types, some

log = logging.getLogger("qat")


class Step(Protocol):
    """Step of `calibrate` besides finding ranges; `qat.post_training` has several."""

    @property
    def before_ranges(self) -> bool:
        """True if it must come before the ranges are found, since they depend on it."""

    def run(self, model: nn.Module, original: nn.Module, batches: Iterable[Batch]) -> str:
        """Change weights, biases or statistics in place, and return a sentence about it.

        The model is to answer as the original does with its quantizers off: a copy from before the steps behind the
        ranges.
        """


@in_full_precision
def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    limit: int | None = None,
    *,
    only_missing: bool = False,
    steps: Sequence[Step] = (),
) -> None:
    """Set every range, of weights and of activations, from a few batches.

    The batches run through the model in evaluation mode. First weights get the range of their present values. Then the
    batches run with quantized weights, while activations pass unquantized. Each quantizer observes its tensor and then
    takes the range that its spec's `init` finds. Frozen ranges stay (`freeze_scales`), and the log says so; quantizers
    that are switched off get theirs. Train and eval flags are restored. At the end a fused training step is compared
    with a plain one on a slice of the first batch, see docs/speed.md. Under torch.distributed every rank may bring its
    own batches; all ranks end with the same ranges, found on all values. If it raises, the model is as before.

    Args:
        model: a prepared model, or one with quantized layers of your own.
        batches: tensors; or sequences whose first item is the input, or a tuple of inputs (labels are ignored); or
            mappings of keyword arguments. A tuple of images beside a tuple of as many targets (mappings), as
            torchvision's detection loaders give them, is one argument. Tensors, in lists and mappings too, are moved
            to the model's device. A tensor, or a mapping, instead of the batches is one batch.
        limit: how many batches are read at most, of each rank; None: all.
        only_missing: leave the ranges that were calibrated before, and have learned since; their quantizers are on
            while the batches run. Steps that ranges depend on make all of them missing.
        steps: post-training steps, such as `[CrossLayerEqualization(), AdaRound()]` of `qat.post_training`, which
            change weights and biases without labels. They run in their order, those that ranges depend on before the
            ranges are found. All batches stay in memory for them; under torch.distributed rank 0 computes them, on its
            own batches. Each logs what it did, and its seconds. They aim at the model as it comes: give all of them in
            one call, since a second one takes what the first one made for the original.

    Raises:
        TypeError: for a model, batch or step of another type.
        ValueError: for a model without quantizers, or without a graph for steps; without a batch; for a limit below 1;
            if the model does not run with a batch; if a quantizer saw no value, or NaN or infinity (the first that did
            is named); if a twin of your own (`register_twin`) evaluates otherwise than it trains.

    >>> from qat import QuantLinear
    >>> layer = QuantLinear(4, 2)
    >>> calibrate(layer, torch.randn(16, 4))
    >>> calibrate(layer, (torch.randn(16, 4) for _ in range(1000)), limit=8)
    """
    given = as_batches(calibrate, model, batches)
    check_types(calibrate, locals())
    if steps:
        for step in steps:
            if isinstance(step, type) or not hasattr(step, "before_ranges"):
                raise TypeError(f"calibrate: steps are objects such as AdaRound(), got {step!r}")
        only_missing = only_missing and not any(step.before_ranges for step in steps)
        if not traced_parts(model):
            raise ValueError("calibrate: steps work on the graphs of qat.prepare, and this model has none")
        given = list(itertools.islice(given, limit))  # steps read them many times
    quantizers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Quantizer) and module.role == "activation"
    }
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLayer)]
    open_weights = [each for each in layers if not (only_missing and each[1].weight_quantizer.is_calibrated)]
    if not quantizers and not layers:
        raise ValueError("calibrate: the model has no quantized layer and no activation quantizer; call prepare first")
    warn_of_young_norms(model)
    with _unchanged_on_error(model, bool(steps)), first_calls(traced_parts(model).values()) as calls:
        _take(model, given, [step for step in steps if step.before_ranges])
        with evaluating(model):  # weights first, since activations are observed behind quantized weights
            for name, module in open_weights:
                with _naming(f"weight of {name!r}"):
                    module.calibrate_weight()
            functions = [module for _, module in open_weights if isinstance(module, QuantFunction)]
            warn_of_losses([(n, m) for n, m in open_weights if m not in functions and not m.weight_quantizer.is_frozen])
        if only_missing:
            quantizers = {name: each for name, each in quantizers.items() if not each.is_calibrated}
        observers = _observe(model, quantizers, functions, given, limit)
        _set_ranges(_not_frozen(model, quantizers), observers)
        _take(model, given, [step for step in steps if not step.before_ranges])
    with this_rank_alone():  # the others may have no batches
        check_own_twins(model, calls)
        check_parts(model, calls)
    reshard(model)  # an optimizer may be created next


def _take(model: nn.Module, batches: Iterable[Batch], steps: list[Step]) -> None:
    if not steps:
        return
    original = copy.deepcopy(model)
    for step in steps if rank() == 0 else ():  # the others take its result below
        began = time.perf_counter()
        with this_rank_alone():
            done = step.run(model, original, batches)
        log.info("calibrate: %s: %s (%.1f s)", type(step).__name__, done, time.perf_counter() - began)
    take_from_first(model)


@contextmanager
def _unchanged_on_error(model: nn.Module, weights: bool) -> Iterator[None]:
    # Without steps only quantizers change: no copy of all weights is needed.
    changed = [model] if weights else [module for module in model.modules() if isinstance(module, Quantizer)]
    states = [copy.deepcopy(module.state_dict()) for module in changed]
    try:
        yield
    except BaseException:  # Ctrl-C too
        for module, state in zip(changed, states, strict=True):
            module.load_state_dict(state)
        raise


def _observe(
    model: nn.Module,
    quantizers: dict[str, Quantizer],
    functions: list[QuantFunction],
    batches: Iterable[Batch],
    limit: int | None,
) -> dict[str, RangeObserver]:
    turns = itertools.count()  # shared, so that each observer knows its place in the order of execution
    observers = {name: RangeObserver(turns) for name in quantizers}
    try:
        for name, quantizer in quantizers.items():
            quantizer.observer = observers[name]
        for function in functions:  # their weights are known, and get their ranges, only in forward
            function.calibrating = True
        with evaluating(model):
            _run(model, batches, limit)
    finally:
        for quantizer in quantizers.values():
            quantizer.observer = None
        for function in functions:
            function.calibrating = False
    return observers


def _not_frozen(model: nn.Module, quantizers: dict[str, Quantizer]) -> list[tuple[str, Quantizer]]:
    own = {name: each for name, each in model.named_modules() if isinstance(each, Quantizer) and not each.is_fixed}
    frozen = [name for name, each in own.items() if each.is_frozen]
    if frozen:
        said = "calibrate: %d frozen ranges stay as they are (%s); qat.freeze_scales(model, False) lets them go"
        log.warning(said, len(frozen), some(frozen))
    return [(name, quantizer) for name, quantizer in quantizers.items() if not quantizer.is_frozen]


def _run(model: nn.Module, batches: Iterable[Batch], limit: int | None) -> None:
    count = 0
    with torch.no_grad():
        for batch in itertools.islice(batches, limit):
            count += 1
            run_batch("calibrate", model, inputs_and_labels("calibrate", batch)[0])
    if not any(of_all_ranks(count > 0)):
        raise ValueError("calibrate: batches is empty; at least one batch is needed to find the ranges")


def _set_ranges(quantizers: list[tuple[str, Quantizer]], observers: dict[str, RangeObserver]) -> None:
    found = []
    for name, quantizer in quantizers:
        observer, extremes = observers[name], quantizer.spec.init == "minmax" and not quantizer.needs_sample
        seen = [torch.from_numpy(part) for part in of_all_ranks(observer.values(extremes).numpy())]
        turns, elements = zip(*of_all_ranks((observer.turn, observer.elements)), strict=True)
        # A rank without batches has 0 elements, and the last turn of all.
        found.append((min(turns), name, quantizer, torch.cat(seen, dim=1), max(elements)))
    # In the order of execution, so that an error names the quantizer where NaN began.
    for _, name, quantizer, values, count in sorted(found, key=lambda each: each[0]):
        if values.numel() == 0:
            raise ValueError(f"calibrate: quantizer {name!r} saw no values; is its part of the model ever run?")
        with _naming(f"quantizer {name!r}"):
            quantizer.fit(values, count)


@contextmanager
def _naming(tensor: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"calibrate: {tensor}: {error}") from error
