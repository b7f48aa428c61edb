"""`calibrate`: set the range of every activation from a few batches, equal on all ranks."""

import copy
import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qat.collectives import of_all_ranks, reshard, this_rank_alone
from qat.contexts import evaluating, first_calls
from qat.inputs import Batch, as_batches, inputs_and_labels, run_batch
from qat.layers import QuantFunction, QuantLayer
from qat.preparation.proof import check_own_twins, check_parts, traced_parts
from qat.quantizer import Quantizer, RangeObserver

log = logging.getLogger("qat")


def calibrate(
    model: nn.Module, batches: Iterable[Batch], limit: int | None = None, *, only_missing: bool = False
) -> None:
    """Run the batches through the model in evaluation mode and set every range, of activations and of weights.

    First weights get the range of their present values. Then the batches run with quantized weights, while activations
    pass unquantized. Each quantizer observes its tensor and then takes the range that its spec's `init` finds. Frozen
    ranges stay (`freeze_scales`), and the log says so; quantizers that are switched off get theirs. Train and eval
    flags are restored. At the end a fused training step is compared with a plain one on a slice of the first batch,
    see docs/speed.md. Under torch.distributed every rank may bring its own batches; all ranks end with the same
    ranges, found on all values. If it raises, every range is as before.

    Args:
        model: a prepared model, or one with quantized layers of your own.
        batches: tensors; or sequences whose first item is the input, or a tuple of inputs (labels are ignored); or
            mappings of keyword arguments. A tuple of images beside a tuple of as many targets (mappings), as
            torchvision's detection loaders give them, is one argument. Tensors, in lists and mappings too, are moved
            to the model's device. A tensor, or a mapping, instead of the batches is one batch.
        limit: how many batches are read at most, of each rank; None: all.
        only_missing: leave the ranges that were calibrated before, and have learned since; their quantizers are on
            while the batches run.

    Raises:
        TypeError: if model is not an nn.Module, batches is not iterable, or a batch has an unsupported type.
        ValueError: for a model without quantizers; without a batch; for a limit below 1; if the model does not run with
            a batch; if a quantizer saw no value, or NaN or infinity (the first that did is named); if a twin of your
            own (`register_twin`) evaluates otherwise than it trains.

    >>> from qat import QuantLinear
    >>> layer = QuantLinear(4, 2)
    >>> calibrate(layer, torch.randn(16, 4))
    >>> calibrate(layer, (torch.randn(16, 4) for _ in range(1000)), limit=8)
    """
    given = as_batches(calibrate, model, batches)
    quantizers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Quantizer) and module.role == "activation"
    }
    open_weights = [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, QuantLayer) and not (only_missing and module.weight_quantizer.is_calibrated)
    ]  # fmt: skip
    if not quantizers and not any(isinstance(module, QuantLayer) for module in model.modules()):
        raise ValueError("calibrate: the model has no quantized layer and no activation quantizer; call prepare first")
    with _unchanged_on_error(model), first_calls(traced_parts(model).values()) as calls:
        with evaluating(model):  # weights first: activations are observed behind the weights that will be used
            for name, module in open_weights:
                with _naming(f"weight of {name!r}"):
                    module.calibrate_weight()
        if only_missing:
            quantizers = {name: each for name, each in quantizers.items() if not each.is_calibrated}
        functions = [module for _, module in open_weights if isinstance(module, QuantFunction)]
        observers = _observe(model, quantizers, functions, given, limit)
        _set_ranges(_not_frozen(model, quantizers), observers)
    with this_rank_alone():  # the others may have no batches
        check_own_twins(model, calls)
        check_parts(model, calls)
    reshard(model)  # an optimizer may be created next


@contextmanager
def _unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """A context that gives every quantizer its state back if the block raises."""
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    states = [copy.deepcopy(quantizer.state_dict()) for quantizer in quantizers]
    try:
        yield
    except BaseException:
        for quantizer, state in zip(quantizers, states, strict=True):
            quantizer.load_state_dict(state)
        raise


def _observe(
    model: nn.Module,
    quantizers: dict[str, Quantizer],
    functions: list[QuantFunction],
    batches: Iterable[Batch],
    limit: int | None,
) -> dict[str, RangeObserver]:
    """What each quantizer sees while the batches run; the weights of functions get their ranges on the way."""
    turns = itertools.count()
    observers = {name: RangeObserver(turns) for name in quantizers}
    try:
        for name, quantizer in quantizers.items():
            quantizer.observer = observers[name]
        for function in functions:
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
    """Those whose range is to be set; the log names the others, weights included."""
    frozen = [name for name, module in model.named_modules() if isinstance(module, Quantizer) and module.is_frozen]
    if frozen:
        log.warning(
            "calibrate: %d frozen ranges stay as they are (%s%s); qat.freeze_scales(model, False) lets them go",
            len(frozen), ", ".join(frozen[:3]), " ..." if len(frozen) > 3 else "",
        )  # fmt: skip
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
    """Set the ranges in the order in which the model ran, so that an error names the quantizer where NaN began."""
    found = []
    for name, quantizer in quantizers:
        observer = observers[name]
        extremes = quantizer.spec.init == "minmax" and not quantizer.needs_sample
        seen = [torch.from_numpy(part) for part in of_all_ranks(observer.values(extremes).numpy())]
        turns, elements = zip(*of_all_ranks((observer.turn, observer.elements)), strict=True)
        # A rank without batches has 0 elements, and the last turn of all.
        found.append((min(turns), name, quantizer, torch.cat(seen, dim=1), max(elements)))
    for _, name, quantizer, values, count in sorted(found, key=lambda each: each[0]):
        if values.numel() == 0:
            raise ValueError(f"calibrate: quantizer {name!r} saw no values; is its part of the model ever run?")
        with _naming(f"quantizer {name!r}"):
            quantizer.fit(values, count)


@contextmanager
def _naming(tensor: str) -> Iterator[None]:
    """A context whose errors say of which tensor the range is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"calibrate: {tensor}: {error}") from error
