"""What is fused with a quantizer on the CPU: BatchNorm, clamp and quantization; a sum, clamp and quantization."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from qat.kernels.cpu import Extent, Grid, address, compiled, threads_for


@dataclass(frozen=True)
class ClippedGrid:
    """A clamp to floor .. ceiling, then a grid: what a ReLU and the quantizer behind it do.

    Attributes:
        grid: with codes that fit uint8.
        floor, ceiling: of the clamp; -inf and inf for none. The gradient passes strictly between.
    """

    grid: Grid
    floor: float = float("-inf")
    ceiling: float = float("inf")


def sizes_of(y: Tensor) -> tuple[int, int, int] | None:
    """The fields of `Extent`: where the channels lie in memory (axis 1; of 2-D and 3-D tensors the last one).

    None if neither way fits.
    """
    if y.dim() < 4:
        return (y.numel() // y.shape[-1], y.shape[-1], 1) if y.is_contiguous() else None
    channels = y.shape[1]
    if y.is_contiguous():
        return y.shape[0], channels, y.numel() // (y.shape[0] * channels)
    nearest = torch.channels_last if y.dim() == 4 else torch.channels_last_3d
    return (y.numel() // channels, channels, 1) if y.is_contiguous(memory_format=nearest) else None


def extent_of(y: Tensor) -> Extent:
    """The same for the kernels, of a tensor that fits."""
    sizes = sizes_of(y)
    assert sizes is not None
    return Extent(*sizes)


def statistics(
    y: Tensor, eps: float, running: tuple[Tensor, Tensor] | None = None, share: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of every channel, summed in float64.

    Args:
        y: the tensor.
        eps: of the norm.
        running: mean and variance that are moved towards the batch's (the unbiased one) by `share`, in place.
        share: the momentum.
    """
    extent = extent_of(y)
    mean, inverse = torch.empty(extent.channels), torch.empty(extent.channels)
    running_mean, running_var = running or (None, None)
    compiled().statistics(
        address(y), extent, ctypes.c_double(eps), address(mean), address(inverse), address(running_mean),
        address(running_var), ctypes.c_double(share), threads_for(y.numel()),
    )  # fmt: skip
    return mean, inverse


def quantize_codes(x: Tensor, grid: Grid) -> tuple[Tensor, bool]:
    """uint8 codes of x, and whether x holds a NaN."""
    codes = torch.empty_like(x, dtype=torch.uint8)
    bad = compiled().quantize_codes(address(x), address(codes), ctypes.c_int64(x.numel()), grid, threads_for(x.numel()))
    return codes, bool(bad)


def step_slopes(x: Tensor, grid: Grid) -> Tensor:
    """The derivative of every quantized value by the step."""
    slopes = torch.empty_like(x)
    compiled().step_slopes(address(x), address(slopes), ctypes.c_int64(x.numel()), grid, threads_for(x.numel()))
    return slopes


def dot(a: Tensor, b: Tensor) -> float:
    """The sum of a * b, both of the same memory format, in float64 over short float32 sums."""
    function = compiled().dot
    function.restype = ctypes.c_double
    return float(function(address(a), address(b), ctypes.c_int64(a.numel()), threads_for(a.numel())))


def dequantize(codes: Tensor, step: float, zero: float) -> Tensor:
    """(codes - zero) * step in float32, in the memory format of codes."""
    y = torch.empty_like(codes, dtype=torch.float32)
    compiled().dequantize(
        address(codes), address(y), ctypes.c_int64(y.numel()), ctypes.c_float(step), ctypes.c_float(zero),
        threads_for(y.numel()),
    )  # fmt: skip
    return y


class NormPointers(ctypes.Structure):
    """A BatchNorm as the kernels take it."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("gamma", "beta", "mean", "inverse")]


@dataclass(frozen=True)
class Norm:
    """A BatchNorm's numbers, one a channel: z = (y - mean) * inverse * gamma + beta."""

    gamma: Tensor
    beta: Tensor
    mean: Tensor
    inverse: Tensor

    def argument(self) -> NormPointers:
        """As the kernels take it."""
        return NormPointers(*(x.data_ptr() for x in (self.gamma, self.beta, self.mean, self.inverse)))


def norm_quantize(y: Tensor, norm: Norm, clipped: ClippedGrid) -> tuple[Tensor, bool]:
    """Codes of clamp(norm(y)), and whether there was a NaN."""
    codes = torch.empty_like(y, dtype=torch.uint8)
    bad = compiled().norm_quantize(
        address(y), address(codes), extent_of(y), norm.argument(), clipped.grid, ctypes.c_float(clipped.floor),
        ctypes.c_float(clipped.ceiling), threads_for(y.numel()),
    )  # fmt: skip
    return codes, bool(bad)


def norm_quantize_backward(
    grad: Tensor, y: Tensor, norm: Norm, clipped: ClippedGrid, follows_batch: bool, needs_y: bool
) -> tuple[Tensor | None, Tensor, Tensor, float]:
    """The gradients of y (if wanted), gamma, beta and the step; grad in the memory format of y."""
    extent, grad_y = extent_of(y), torch.empty_like(y) if needs_y else None
    grad_gamma, grad_beta = torch.empty(extent.channels), torch.empty(extent.channels)
    function = compiled().norm_quantize_backward
    function.restype = ctypes.c_double
    total = function(
        address(grad), address(y), address(grad_y), extent, norm.argument(), clipped.grid,
        ctypes.c_float(clipped.floor), ctypes.c_float(clipped.ceiling), int(follows_batch), address(grad_gamma),
        address(grad_beta), threads_for(y.numel()),
    )  # fmt: skip
    return grad_y, grad_gamma, grad_beta, float(total)


class Addend(ctypes.Structure):
    """A quantized tensor as the kernels take it."""

    _fields_ = [("codes", ctypes.c_void_p), ("step", ctypes.c_float), ("zero", ctypes.c_float)]


@dataclass(frozen=True)
class Operand:
    """A quantized tensor as an operand: (codes - zero) * step."""

    codes: Tensor
    step: float
    zero: float

    def argument(self) -> Addend:
        """As the kernels take it."""
        return Addend(self.codes.data_ptr(), self.step, self.zero)


def add_quantize(a: Operand, b: Operand, clipped: ClippedGrid) -> tuple[Tensor, bool]:
    """Codes of clamp(a + b), both of the same memory format, and whether there was a NaN."""
    codes = torch.empty_like(a.codes)
    bad = compiled().add_quantize(
        a.argument(),
        b.argument(), address(codes), ctypes.c_int64(codes.numel()), clipped.grid,
        ctypes.c_float(clipped.floor), ctypes.c_float(clipped.ceiling), threads_for(codes.numel()),
    )  # fmt: skip
    return codes, bool(bad)


def add_quantize_backward(grad: Tensor, a: Operand, b: Operand, clipped: ClippedGrid) -> tuple[Tensor, float]:
    """The gradient of the sum, which is that of both operands, and that of the step."""
    grad_sum = torch.empty_like(grad)
    total = (ctypes.c_double * 1)()
    compiled().add_quantize_backward(
        address(grad), a.argument(),
        b.argument(), address(grad_sum), ctypes.c_int64(grad.numel()), clipped.grid,
        ctypes.c_float(clipped.floor), ctypes.c_float(clipped.ceiling), total, threads_for(grad.numel()),
    )  # fmt: skip
    return grad_sum, total[0]
