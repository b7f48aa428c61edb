"""`quantizer_statistics`: each quantizer's effect as numbers; warnings of losses."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from qat.analysis.grid_weights import weights_of
from qat.collectives import whole
from qat.contexts import evaluating
from qat.inputs import Batch, expect_model, inputs_and_labels, run_batch
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.quantizer.base import FLOOR_SHARE
from qat.quantizer.granularity import to_groups
from qat.ranges import require_finite

SAMPLE = 2**14
"""Approximate number of values that are sampled of a tensor."""

BEST_SQNR = 120.0
"""Shown for an error of (nearly) zero, in dB: float32 has 140."""


def quantizer_statistics(model: nn.Module, batch: Batch) -> dict[str, dict[str, float]]:
    """Measure each quantizer in use: clipped values, used levels, the error it adds.

    With v = x / scale + zero_point and y the quantized x, over a sample of some 16,000 values of each tensor:

        clipped_low  = share of v < qmin - 1;    clipped_high = share of v > qmax + 1
        levels       = integers that occur / integers of the grid
        sqnr         = 10 * log10(sum(x^2) / sum((x - y)^2)), in dB, at most 120

    Less than half a step beyond the grid, which ends at qmin - 0.5 and qmax + 0.5, a value loses little more than by
    rounding, and does not count. A healthy 8-bit tensor has 30 to 45 dB, each bit less costs 6. Rules off the uniform
    grid have `sqnr` alone.

    Args:
        model: prepared and calibrated; it runs once in evaluation mode, and is then in the mode that it was in.
        batch: images, as for `calibrate`; eight are enough.

    Returns:
        By the quantizer's name in the model, the shares (0 to 1) and `sqnr`; without quantizers that are switched off
        or that the batch did not reach.

    >>> import qat
    >>> x = torch.randn(64, 8)
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 2)), example_inputs=x)
    >>> qat.calibrate(model, [x])
    >>> found = quantizer_statistics(model, 2 * x)
    >>> sorted(found["input_quantizer"]), found["input_quantizer"]["clipped_high"] > 0.01
    (['clipped_high', 'clipped_low', 'levels', 'sqnr'], True)
    """
    expect_model(quantizer_statistics, model)
    with evaluating(model), torch.no_grad(), statistics_collected(model) as found:
        run_batch("quantizer_statistics", model, inputs_and_labels("quantizer_statistics", batch)[0])
    return found


@contextmanager
def statistics_collected(model: nn.Module) -> Iterator[dict[str, dict[str, float]]]:
    """Watch a model's first forward; at the end, fill in `quantizer_statistics`."""
    names = {module: name for name, module in model.named_modules() if isinstance(module, Quantizer)}
    seen: dict[Quantizer, dict[str, Tensor]] = {}
    found: dict[str, dict[str, float]] = {}

    def note(quantizer: Quantizer, args: tuple[Tensor, ...], y: Tensor) -> None:
        if quantizer not in seen and not quantizer.passes and quantizer.role == "activation":
            seen[quantizer] = _of(quantizer, *sampled_activation(quantizer, args[0], y))

    with ExitStack() as hooks:
        for quantizer in names:
            hooks.enter_context(quantizer.register_forward_hook(note))
        # A hooked model evaluates operation by operation: later forwards run without hooks.
        hooks.enter_context(model.register_forward_hook(lambda *_: hooks.close()))
        yield found
    with torch.no_grad():
        for quantizer, read in weight_samples(model).items():
            rows = read()
            seen[quantizer] = _of(quantizer, rows, quantizer.quantize(rows))
    flat = [value for row in seen.values() for value in row.values()]
    numbers = iter(torch.stack(flat).tolist() if flat else [])  # one device synchronisation
    found.update({names[quantizer]: {key: next(numbers) for key in row} for quantizer, row in seen.items()})


def weight_samples(model: nn.Module) -> dict[Quantizer, Callable[[], Tensor]]:
    """Map the quantizer of each weight to a function that samples the weight."""
    return {
        each.quantizer: partial(_sample_of_rows, each.rows, each.quantizer)
        for _, each in weights_of(model)
        if each.is_known and not each.quantizer.passes
    }


def _sample_of_rows(rows_of: Callable[[], Tensor], quantizer: Quantizer) -> Tensor:
    # Some inputs of every output channel; all of a weight whose rule finds its scale in it.
    rows = rows_of().detach()
    whole = quantizer.spec.granularity == "group" or type(quantizer).grid is not Quantizer.grid
    return rows if whole or rows.dim() < 2 else rows[:, :: 1 + rows.numel() // SAMPLE]


def sampled_activation(quantizer: Quantizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a tensor before and after; all of it, in groups, if it has several grids."""
    if quantizer.spec.granularity != "tensor":
        return to_groups(x, quantizer.spec), to_groups(y, quantizer.spec)
    step = 1 + x.numel() // SAMPLE
    return x.flatten()[::step], y.flatten()[::step]


def _of(quantizer: Quantizer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    x, y = x.float(), y.float()
    row = {"sqnr": sqnr(x, y)}
    if quantizer.uniform and quantizer.exportable:
        qmin, qmax = quantizer.bounds()
        scale, zero_point = quantizer.grid(x)
        steps = x / scale + zero_point
        integers = ((x / scale).round() + zero_point).nan_to_num(0.0)
        used = torch.bincount((integers.clamp(qmin, qmax) - qmin).flatten().long(), minlength=qmax - qmin + 1)
        row |= {"clipped_low": (steps < qmin - 1).float().mean(), "clipped_high": (steps > qmax + 1).float().mean()}
        row["levels"] = (used > 0).float().mean()
    return row


def sqnr(x: Tensor, y: Tensor) -> Tensor:
    """10 * log10(sum(x^2) / sum((x - y)^2)) in dB, a scalar between -120 and 120."""
    signal, noise = x.double().square().sum(), (x.double() - y.double()).square().sum()
    exact = noise == 0  # false for NaN, which counts as the worst error
    found = torch.where(exact, BEST_SQNR, 10 * torch.log10(signal / noise)).nan_to_num(-BEST_SQNR)
    return found.clamp(-BEST_SQNR, BEST_SQNR).float()


def learned_statistics(quantizers: dict[str, Quantizer]) -> dict[str, Tensor]:
    """Learned values by curve and name, of shape (): `scale/fc.weight_quantizer`.

    What starts from a calibrated value is drawn relative to that, as the geometric mean over channels: 1 at the start.
    `at_floor` is the share of scales that rest on their floor, 1/32.
    """
    curves: dict[str, Tensor] = {}
    for name, each in quantizers.items():
        for kind, values in each.curves().items():
            floor = getattr(each, f"smallest_{kind}", None)
            relative = None if floor is None else torch.maximum(values.detach() / floor, torch.ones_like(floor))
            curves[f"{kind}/{name}"] = values if relative is None else relative.log().mean().exp() * FLOOR_SHARE
        zero_point = getattr(each, "zero_point", None)  # some rules have none
        if zero_point is not None:
            curves[f"zero_point/{name}"] = zero_point
        resting = each.scales_at_minimum()
        if resting is not None:
            curves[f"at_floor/{name}"] = resting / sum(p.numel() for p in each.positive_parameters())
        if each.spec.ewgs == "hessian":
            curves[f"ewgs_delta/{name}"] = each.ewgs_delta
    return {key: values.detach().float().mean() for key, values in curves.items()}


LOST, LOST_MORE = 15.0, 18.0
"""A rule that keeps fewer dB of a weight, and so many fewer than its bits can, is warned of: floats and MX keep 24."""


@torch.no_grad()
def warn_of_losses(layers: list[tuple[str, QuantLayer]]) -> None:
    """Warn of rules that lose far more than an even grid would; refuse NaN."""
    lost = []
    for name, layer in layers:
        quantizer, weight = layer.weight_quantizer, layer.channels_first(whole(layer.weight)).float()
        spec, rows = quantizer.spec, weight.reshape(1, -1) if quantizer.shape == () else weight.flatten(1)
        low, high = rows.aminmax(dim=1, keepdim=True)
        step = ((high - low) / (2**spec.bits - 1)).clamp(min=torch.finfo(rows.dtype).tiny)
        even = min(float(sqnr(rows, ((rows - low) / step).round() * step + low)), 6.0 * spec.bits)
        quantized = quantizer(weight)
        require_finite(quantized, f"calibrate: weight of {name!r}: behind the rule {spec.rule!r} ")
        if (found := float(sqnr(weight, quantized))) < min(LOST, even - LOST_MORE):
            lost.append(
                f"calibrate: the rule {spec.rule!r} keeps {found:.0f} dB of the weight of {name!r}, where {spec.bits}"
                f" bits keep {even:.0f}; choose other options than {dict(spec.options)}, or another rule"
            )
    if lost:
        warnings.warn(lost[0] + (f" ({len(lost) - 1} more layers too)" if lost[1:] else ""), stacklevel=3)
