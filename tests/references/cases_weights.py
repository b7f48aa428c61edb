"""Rows of the proof matrix for the weight rules whose levels come from the whole tensor or channel: DoReFa, binary,
ternary, and APoT's normalization.

The surrogates are written from the published formulas with detach; the references are in reference_codebooks.py.
Input points are multiples of small powers of two, so that bounds and ties stay bounds and ties in every dtype.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from qat.functional.codebooks.apot import normalize_weight
from qat.functional.codebooks.binary import binary_quantize
from qat.functional.codebooks.ternary import ternary_quantize, ttq_quantize
from qat.functional.dorefa import dorefa_quantize_weight
from tests.references import reference_codebooks as reference
from tests.references import reference_primitives as signs
from tests.references.cases_primitives import SIGN_SURROGATES, error_decay_surrogate
from tests.references.estimator_case import Case
from tests.references.surrogates import clip, straight_through, tensor

WEIGHT = (-1.5, -1.25, -1.0, -0.75, -0.4375, -0.125, -0.0625, -0.0, 0.0, 0.03125, 0.21875, 0.5625, 0.875, 1.0, 1.125)
WEIGHT += (1.5, 0.3125, -0.28125, -0.9375, 0.6875, 0.34375, -0.53125, 1.3125, -1.1875)
"""Both bounds of a gradient clipped at 1, values on either side, zeros of both signs, and the maximum twice."""


def channels(*magnitudes: float) -> Tensor:
    """One channel of WEIGHT for each magnitude, with a spatial axis of 3: shape (channels, 8, 3)."""
    return torch.stack([tensor(WEIGHT).roll(5 * i).reshape(8, 3) * size for i, size in enumerate(magnitudes)])


def reduced(x: Tensor, channel_axis: reference.ChannelAxis) -> list[int]:
    axes = () if channel_axis is None else (channel_axis,) if isinstance(channel_axis, int) else channel_axis
    return [axis for axis in range(x.ndim) if axis not in {kept % x.ndim for kept in axes}]


def scales_of(x: Tensor, channel_axis: reference.ChannelAxis) -> int:
    """The number of parts of x with a scale of their own."""
    return len(list(reference.groups(tuple(x.shape), channel_axis)))


def own_scales(channel_axis: reference.ChannelAxis) -> dict[str, str]:
    """The property that a rule loses if each channel has its own scale."""
    return {} if channel_axis is None else {"monotone": "only within a channel: each has its own scale"}


UNBOUNDED = {"outside": "nothing is clipped: the gradient passes everywhere"}


# DoReFa


def dorefa_surrogate(w: Tensor, bits: int, channel_axis: reference.ChannelAxis) -> Tensor:
    axes = reduced(w, channel_axis)
    if bits == 1:
        return straight_through(torch.where(w >= 0, 1.0, -1.0) * w.abs().mean(axes, keepdim=True), w)
    n, t = 2**bits - 1, torch.tanh(w)
    u = t / (2 * t.abs().amax(axes, keepdim=True)) + 0.5
    return 2 * straight_through(torch.round(u * n) / n, u) - 1


def dorefa_weight_case(bits: int, channel_axis: reference.ChannelAxis) -> Case:
    place = "per tensor" if channel_axis is None else "per channel"
    excused = {
        "zero": "an even number of levels, symmetric about 0: none is 0",
        **UNBOUNDED,
        **own_scales(channel_axis),
    }
    if bits > 2:  # at 2 bits the four levels are too far apart
        excused["idempotent"] = "tanh moves the levels before they are rounded again"
    zero_channel = (0.0,) if bits == 1 and channel_axis is not None else ()
    w = channels(1.0, 0.25, *zero_channel, 3.0)
    return Case(
        name=f"dorefa_quantize_weight, {bits} bit, {place}",
        function=partial(dorefa_quantize_weight, bits=bits, channel_axis=channel_axis),
        inputs=(w,),
        surrogate=partial(dorefa_surrogate, bits=bits, channel_axis=channel_axis),
        reference=lambda w: reference.dorefa_weight(w, bits, channel_axis),
        reference_gradient=lambda grad, w: reference.dorefa_weight_gradients(w, bits, grad, channel_axis),
        elementwise=False,
        levels=2 * scales_of(w, channel_axis) if bits == 1 else 2**bits,
        excused=excused,
    )


def normalize_case(channel_axis: reference.ChannelAxis) -> Case:
    def surrogate(w: Tensor) -> Tensor:
        axes = reduced(w, channel_axis)
        deviation = w.std(axes, correction=0, keepdim=True).clamp(min=1e-5)
        return (w - w.mean(axes, keepdim=True).detach()) / deviation.detach()

    excused = {**UNBOUNDED, **own_scales(channel_axis)}
    excused |= {"levels": "no quantizer: what comes before one", "zero": "the mean moves to 0"}
    return Case(
        name=f"normalize_weight, {'per tensor' if channel_axis is None else 'per channel'}",
        function=partial(normalize_weight, channel_axis=channel_axis),
        inputs=(channels(1.0, 0.25, 0.0, 4.0) + 0.375,),
        surrogate=surrogate,
        reference=lambda w: reference.normalize(w, channel_axis),
        reference_gradient=lambda grad, w: reference.normalize_gradients(w, grad, channel_axis),
        elementwise=False,
        excused=excused,
    )


# Binary and ternary


def binary_surrogate(w: Tensor, progress: Tensor | None, gradient: str, channel_axis: reference.ChannelAxis) -> Tensor:
    scale = w.abs().mean(reduced(w, channel_axis), keepdim=True)
    shape = SIGN_SURROGATES[gradient](w) if progress is None else error_decay_surrogate(w, progress)
    return straight_through(torch.where(w >= 0, scale, -scale), shape)


def binary_case(gradient: str, channel_axis: reference.ChannelAxis, progress: float | None = None) -> Case:
    """`progress`, if given, is a second input, which gets no gradient."""
    excused = {"zero": "two levels, neither of them 0", **own_scales(channel_axis)}
    if gradient not in ("clipped", "approximate"):
        excused |= UNBOUNDED
    variant = gradient if progress is None else f"{gradient} at {progress}"

    rule = signs.sign(gradient) if progress is None else signs.ERROR_DECAY_SIGN
    w = channels(1.0, 0.25, 0.0, 2.0)
    return Case(
        name=f"binary_quantize, {variant}, channel_axis {channel_axis}",
        function=lambda w, progress=None: binary_quantize(w, channel_axis, gradient, progress),
        inputs=(w, *([] if progress is None else [tensor(progress)])),
        surrogate=lambda w, progress=None: binary_surrogate(w, progress, gradient, channel_axis),
        reference=lambda w, *_: reference.binary(w, channel_axis),
        reference_gradient=rule.backward,
        elementwise=False,
        levels=2 * scales_of(w, channel_axis),
        excused=excused,
    )


def ternary_surrogate(w: Tensor, channel_axis: reference.ChannelAxis) -> Tensor:
    axes = reduced(w, channel_axis)
    kept = w.abs() > 0.7 * w.abs().mean(axes, keepdim=True)
    scale = torch.where(kept, w.abs(), 0).sum(axes, keepdim=True) / kept.sum(axes, keepdim=True).clamp(min=1)
    return straight_through(torch.where(kept, scale * torch.sign(w), 0), w)


def ternary_case(channel_axis: reference.ChannelAxis) -> Case:
    excused = {**UNBOUNDED, **own_scales(channel_axis)}
    w = channels(1.0, 0.25, 0.0, 2.0)
    return Case(
        name=f"ternary_quantize, channel_axis {channel_axis}",
        function=partial(ternary_quantize, channel_axis=channel_axis),
        inputs=(w,),
        surrogate=partial(ternary_surrogate, channel_axis=channel_axis),
        reference=lambda w: reference.ternary(w, channel_axis),
        reference_gradient=lambda grad, w: (grad.copy(),),
        elementwise=False,
        levels=2 * scales_of(w, channel_axis) + 1,
        excused=excused,
    )


def ttq_gradient(grad: Tensor, w: Tensor, positive: Tensor, negative: Tensor, threshold: float) -> tuple[Tensor, ...]:
    """The published rule, which no function has as gradient: that of w depends on the levels, but not vice versa."""
    sizes = (1,) * (w.ndim - positive.ndim) + tuple(positive.shape)
    bound = threshold * w.detach().abs().amax([axis for axis, size in enumerate(sizes) if size == 1], keepdim=True)
    above, below = w > bound, w < -bound
    grad_w = grad * torch.where(above, positive, torch.where(below, negative, torch.ones_like(w)))
    grad_positive, grad_negative = torch.where(above, grad, 0), torch.where(below, -grad, 0)
    return grad_w, grad_positive.sum_to_size(positive.shape), grad_negative.sum_to_size(negative.shape)


def ttq_case(name: str, positive: Any, negative: Any, channel_axis: reference.ChannelAxis) -> Case:
    """The largest weight is 2, so 0.125 lies on the threshold and belongs to neither set."""
    threshold, excused = 0.0625, {**UNBOUNDED, **own_scales(channel_axis)}
    w = clip(channels(2.0, 1.0, 0.0), -2.0, 2.0)
    return Case(
        name=f"ttq_quantize, {name}",
        function=partial(ttq_quantize, threshold=threshold),
        inputs=(w, tensor(positive), tensor(negative)),
        gradient=partial(ttq_gradient, threshold=threshold),
        reference=lambda w, positive, negative: reference.ttq(w, positive, negative, threshold),
        reference_gradient=lambda grad, *inputs: reference.ttq_gradients(*inputs, threshold, grad),
        broadcast=(1, 2),
        elementwise=False,
        levels=2 * scales_of(w, channel_axis) + 1,
        excused=excused,
    )


CASES: list[Case] = [
    *(dorefa_weight_case(bits, axis) for bits in (1, 2, 4) for axis in (None, 0)),
    normalize_case(None),
    normalize_case(0),
    *(binary_case("clipped", axis) for axis in (0, (0, 1), None)),
    binary_case("approximate", 0),
    binary_case("straight_through", 0),
    *(binary_case("error_decay", 0, progress) for progress in (0.0, 0.3, 1.0)),
    ternary_case(0),
    ternary_case(None),
    ttq_case("per tensor", 0.9, 1.3, None),
    ttq_case("per channel", [[[0.9]], [[0.4]], [[2.1]]], [[[1.3]], [[0.7]], [[1.9]]], 0),
]
