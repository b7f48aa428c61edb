"""Rules of low-precision floats: fp8 by a scale, and Microscaling in blocks."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.functional import FLOAT_FORMATS, float_quantize, mx_quantize
from qat.quantizer.base import UNCALIBRATED_REACH
from qat.quantizer.registry import register_quantizer
from qat.quantizer.rules.binary import FixedBits, UnlearnedScale


class FloatQuantizer(FixedBits):
    """Base of the 8-bit floats: a learned scale fits the tensor into the format."""

    exportable = False  # floats lie on no integer grid
    integers_from_bits = True
    bits = 8
    format: ClassVar[str]

    def add_parameters(self, device: torch.device | str | None) -> None:
        start = UNCALIBRATED_REACH / FLOAT_FORMATS[self.format].largest
        self.add_positive("scale", torch.full(self.shape, start, device=device))

    def quantize(self, x: Tensor) -> Tensor:
        return float_quantize(x, self.learned("scale", x), self.format)

    def cover(self, low: Tensor, high: Tensor) -> None:
        reach = torch.maximum(-low, high)
        # The larger end becomes the format's largest number.
        self.set_positive("scale", torch.where(reach > 0, reach, 1.0) / FLOAT_FORMATS[self.format].largest)


@register_quantizer("fp8_e4m3")
class E4M3Quantizer(FloatQuantizer):
    """Eight bits: sign, 4 of exponent, 3 of mantissa, up to 448 (arXiv:2209.05433)."""

    format = "e4m3"


@register_quantizer("fp8_e5m2")
class E5M2Quantizer(FloatQuantizer):
    """Eight bits: sign, 5 of exponent, 2 of mantissa, up to 57344 (arXiv:2209.05433)."""

    format = "e5m2"


class MXQuantizer(UnlearnedScale):
    """Base of the Microscaling formats (arXiv:2310.10537), with a scale a block.

    The scale of a block follows its values; there is nothing to learn. Blocks run along the axis that the product sums
    over: axis 1 of weights, and the `summed_axis` of activations; where no layer says it, axis 1 of images and the last
    of others.
    """

    exportable = False
    integers_from_bits = True

    def check_spec(self) -> None:
        super().check_spec()
        size = self.options.block_size
        if size < 1:
            raise ValueError(f"rule {self.spec.rule!r}: option 'block_size' must be at least 1, got {size!r}")
        if self.spec.granularity == "group":
            raise ValueError(
                f"rule {self.spec.rule!r} has blocks of its own; use options={{'block_size': ...}} instead of groups"
            )

    def quantize(self, x: Tensor) -> Tensor:
        guess = 1 if self.role == "weight" or x.dim() > 3 else -1
        axis = (guess if self.summed_axis is None else self.summed_axis) % x.dim()
        size, length = self.options.block_size, x.shape[axis]
        short = -length % size if length > size else 0  # a shorter axis is one block
        if short:  # the last block is filled up with zeros, which change no block's largest value
            x = F.pad(x, (0, 0) * (x.dim() - 1 - axis) + (0, short))
        return mx_quantize(x, self.options.format, size, axis).narrow(axis, 0, length)


@dataclass(frozen=True)
class MXOptions:
    """Options of the block-scaled rules: number format, and values that share a scale."""

    format: str
    block_size: int = 32


@dataclass(frozen=True)
class MXFP8Options(MXOptions):
    """Options of `mxfp8`."""

    format: Literal["e4m3", "e5m2"] = "e4m3"


@register_quantizer("mxfp8")
class MXFP8Quantizer(MXQuantizer):
    """8-bit floats with a power-of-two scale a block."""

    bits = 8
    options_type = MXFP8Options


@dataclass(frozen=True)
class MXFP6Options(MXOptions):
    """Options of `mxfp6`."""

    format: Literal["e2m3", "e3m2"] = "e2m3"


@register_quantizer("mxfp6")
class MXFP6Quantizer(MXQuantizer):
    """6-bit floats with a power-of-two scale a block."""

    bits = 6
    options_type = MXFP6Options


@dataclass(frozen=True)
class MXFP4Options(MXOptions):
    """Options of `mxfp4`."""

    format: Literal["e2m1"] = "e2m1"


@register_quantizer("mxfp4")
class MXFP4Quantizer(MXQuantizer):
    """4-bit floats with a power-of-two scale a block."""

    bits = 4
    options_type = MXFP4Options


@dataclass(frozen=True)
class MXINT8Options(MXOptions):
    """Options of `mxint8`."""

    format: Literal["int8"] = "int8"


@register_quantizer("mxint8")
class MXINT8Quantizer(MXQuantizer):
    """8-bit integers of 1/64 with a power-of-two scale a block."""

    bits = 8
    options_type = MXINT8Options
