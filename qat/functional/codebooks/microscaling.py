"""OCP Microscaling (MX): blocks of low-precision numbers that share a power of two."""

import math

import torch
from torch import Tensor

from qat.functional.codebooks.floats import ELEMENT_FORMATS, FloatFunction, leading_power
from qat.functional.tensors import apply, check_known, require_floating

SCALE_EXPONENTS = (-127, 127)
"""The exponents of E8M0, in which the scale of a block is stored."""


def mx_quantize(x: Tensor, format: str, block_size: int = 32, axis: int = -1) -> Tensor:
    """Put every block of x along an axis on a low-precision grid times a power of two of its own.

    y = scale * cast(x / scale), scale = 2^(floor(log2 max|x|) - e), with e the exponent of the format's largest
    number; cast rounds half to even and saturates. The scale is a constant:
    dy/dx = 1 where |x / scale| <= largest, else 0 (0 so for the end of the block's last binade).

    Args:
        x: any shape, floating point.
        format: "e4m3", "e5m2" (8 bits), "e3m2", "e2m3" (6 bits), "e2m1" (4 bits) or "int8" (MXINT8, steps of 1/64).
        block_size: elements that share a scale; the standard's is 32. An axis that is shorter is one block.
        axis: along which the blocks lie: the one that a matrix product sums over.

    Returns:
        Tensor of the shape and dtype of x. A block of zeros gives zeros, a block with a NaN NaNs; an infinite element
        counts as the largest number of the dtype.

    Raises:
        TypeError: if x is not floating point.
        ValueError: if the format or the axis does not exist, or block_size does not divide the length of the axis.

    Source: Rouhani et al., "Microscaling Data Formats for Deep Learning", arXiv:2310.10537; OCP MX v1.0.

    >>> x = torch.tensor([[0.3, -7.9, 1.0, 0.0], [0.0, 0.0, 0.0, 0.01]])
    >>> mx_quantize(x, "e2m1", block_size=4).tolist()
    [[0.5, -6.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.01171875]]
    """
    require_floating(x, "mx_quantize")
    check_known("format", format, ELEMENT_FORMATS, "mx_quantize")
    rows = x if x.ndim else x.unsqueeze(0)
    if not -rows.ndim <= axis < rows.ndim:
        raise ValueError(
            f"mx_quantize: axis must be in {-rows.ndim}..{rows.ndim - 1} for x of shape {tuple(x.shape)}, got {axis}"
        )
    rows = rows.movedim(axis, -1)
    length = rows.shape[-1]
    size = min(block_size, max(length, 1))
    _check_blocks(length, size, axis)
    blocks = rows.reshape(*rows.shape[:-1], length // size, size)
    y = apply(FloatFunction, blocks, mx_scale(blocks.detach(), format), format).flatten(-2).movedim(-1, axis)
    return y if x.ndim else y.squeeze(0)


def mx_scale(blocks: Tensor, format: str) -> Tensor:
    """The shared power of two of every block, a block being the last axis: 2^-127 .. 2^127, 1 for zeros, or NaN.

    Args:
        blocks: (..., block), floating point, block > 0.
        format: a name of ELEMENT_FORMATS.

    Returns:
        Tensor (..., 1), float32, float64 for float64 blocks.

    >>> mx_scale(torch.tensor([[0.3, -7.9], [0.0, 0.0]]), "e2m1").tolist()
    [[1.0], [1.0]]
    """
    wide = torch.promote_types(blocks.dtype, torch.float32)
    limit = torch.finfo(blocks.dtype).max  # of its own dtype, so that an infinite element stays finite in it
    peak = blocks.abs().amax(-1, keepdim=True).clamp(max=limit).to(wide)
    shift = ELEMENT_FORMATS[format].highest_exponent
    lowest, highest = (exponent + shift for exponent in SCALE_EXPONENTS)
    highest = min(highest, math.frexp(torch.finfo(wide).max)[1] - 1)  # a power that this dtype has
    scale = leading_power(peak, lowest, highest) * 2.0**-shift
    # 1 for zeros: 2^-127 is subnormal, and the processor may be told to read such a number as 0
    return torch.where(peak == 0, 1, torch.where(peak.isnan(), peak, scale))


def _check_blocks(length: int, size: int, axis: int) -> None:
    """Refuse blocks that do not fill the axis."""
    if size < 1:
        raise ValueError(f"mx_quantize: block_size must be at least 1, got {size}")
    if length % size:
        divisors = ", ".join(str(size) for size in range(1, length + 1) if length % size == 0)
        raise ValueError(
            f"mx_quantize: block_size must divide the length of axis {axis}, which is {length}, got {size}; "
            f"its divisors: {divisors}"
        )
