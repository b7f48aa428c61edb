"""Quantizers on a GPU: how near their memory traffic comes to that of a copy.

A copy reads and writes every element; so does the forward. The backward reads the gradient and the input and writes a
gradient. `share` is bytes per second over those of the copy: 1 means that nothing but memory costs time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.speed_operators import QMAX, QMIN, WEIGHT_QMAX, WEIGHT_QMIN, Operand, operand
from benchmarks.speed_timing import Call, Timing

SHAPES = {"activation": (1024, 64, 56, 56), "weight": (16384, 16384)}
"""Large, so that neither starting a kernel nor the caches of the chip count."""

TRAFFIC = {"copy": 2, "forward": 2, "backward": 3}
"""How often every element goes through memory."""

DTYPES = ("float32", "bfloat16")


def kernel_makers(kind: str, dtype: str, shape: tuple[int, ...], device: str = "cuda") -> dict[str, Callable[[], Call]]:
    """The copy, and both directions of the quantizer of this kind of tensor."""
    layout = "channels_last" if len(shape) == 4 else "contiguous"
    given = operand(kind, shape, layout, device, dtype)
    source = given.x.detach()
    return {
        "copy": lambda: lambda: source.clone(),
        "forward": lambda: _forward(given),
        "backward": lambda: _backward(given),
    }


def share(name: str, timing: Timing) -> float:
    """Bytes per second over those of the copy."""
    return TRAFFIC[name] / TRAFFIC["copy"] / timing.ratio


def _quantize(given: Operand) -> Tensor:
    from qat.functional import lsq_plus_quantize, lsq_quantize

    if given.kind == "activation":
        return lsq_plus_quantize(given.x, given.scale, given.zero_point, QMIN, QMAX)
    return lsq_quantize(given.x, given.scale, WEIGHT_QMIN, WEIGHT_QMAX)


def _forward(given: Operand) -> Call:
    def call() -> None:
        with torch.no_grad():
            _quantize(given)

    return call


def _backward(given: Operand) -> Call:
    result = _quantize(given)
    inputs = (given.x, given.scale) + ((given.zero_point,) if given.kind == "activation" else ())

    def call() -> None:
        torch.autograd.grad(result, inputs, given.grad, retain_graph=True)

    return call
