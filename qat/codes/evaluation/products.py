"""`Product`: a convolution or linear layer on codes, with exact sums."""

import functools
import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from qat.codes.evaluation.arithmetic import CodeGrid, centered, dequantize, requantize
from qat.codes.operators.geometry import MOST_INPUTS, Geometry
from qat.codes.operators.grid import SHIFT
from qat.codes.operators.product import layer_geometry
from qat.kernels.cpu import onednn
from qat.kernels.cpu.quantizers import NO_CLIP
from qat.kernels.dispatch import passes_values
from qat.layers import IntegerWeight, QuantFunction, QuantLayer, QuantLinear
from qat.layers.conv import QuantConvolution
from qat.torch_internals import product_of_bytes

log = logging.getLogger("qat")

EXACT = 2**24
"""Limit up to which float32 holds every integer."""

MOST_PARTS = 8
"""Most parts of a sum, each exact in float32; beyond that, float64 is no slower."""

OWN = {
    None, QuantConvolution.operate, QuantLinear.operate, QuantFunction.operate,
    *(kind._conv_forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
}  # fmt: skip
"""The methods by which layers of qat compute; a twin of one's own may have others."""

FEW = 2**18
"""Products up to which float is faster than a call of oneDNN's integer kernels."""


def geometry_of(layer: QuantLayer) -> Geometry | None:
    """Return a layer's geometry, if it is a convolution or product with zero padding."""
    methods = {getattr(type(layer), name, None) for name in ("operate", "_conv_forward")}
    if not methods <= OWN or layer.__dict__.keys() & {"operate", "_conv_forward"}:
        return None
    if not isinstance(layer, (QuantFunction, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return None
    return layer_geometry(layer, getattr(layer, "kernel_size", ()))


class Sums:
    """The lazily built kernel that sums up a product on this machine."""

    def __init__(self) -> None:
        self.run: Callable[[Tensor], Tensor] | None = None
        self.proven, self.shapes = False, set[torch.Size]()


class Product(nn.Module):
    """Maps codes to codes of clamp((sum((x - zero) * weight) + bias) * scale, *clip).

    `source` is the grid of the input and `to` that of the output; without `to`, the product returns these floats.
    """

    def __init__(
        self, layer: QuantLayer, geometry: Geometry, integers: IntegerWeight, source: CodeGrid,
        clip: tuple[float, float] = NO_CLIP, to: CodeGrid | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.geometry, self.source, self.clip, self.grid = geometry, source, clip, to
        self.weight = nn.Buffer(layer.torch_layout(integers.codes.detach()).to(torch.int8).contiguous())
        self.bias = nn.Buffer(integers.bias_codes.detach().float().contiguous())
        self.scale = nn.Buffer(integers.accumulator_scale.detach().float().contiguous())
        self.sums = Sums()
        self.table: Tensor | None = None
        self.kind = torch.uint8
        # Sums of (code - 128) * weight lack this of those of (code - zero) * weight.
        missing = (SHIFT - int(source.zero)) * integers.codes.detach().flatten(1).sum(1)
        self.shift = nn.Buffer(missing.to(torch.int32))

    def forward(self, codes: Tensor) -> Tensor:
        """Return codes on the grid `to`, or floats without one; see `requantize`."""
        if codes.dim() < self.weight.dim():  # an image without a batch
            return cast("Tensor", self(codes[None])[0])
        run = self.sums.run = self.sums.run or self._fastest()
        axis, sums = -1 if self.weight.dim() == 2 else 1, run(codes)
        shift = self.shift if sums.dtype is torch.int32 else None
        return requantize(sums, self.bias, self.scale, axis, self.clip, self.grid, self.table, self.kind, shift)

    def reads(self) -> torch.dtype:
        """Return the dtype in which this machine multiplies the codes, see `requantize`."""
        if passes_values(self.weight):
            return torch.int8 if self._is_of_bytes() else torch.float32
        return torch.uint8 if self.multiplies_integers() else torch.float32

    def _is_of_bytes(self) -> bool:
        # A GPU's product of two matrices of bytes takes pointwise layers, of sizes that are multiples of 8.
        pointwise = self.weight[0].numel() == self.weight.shape[1] and self.weight.dim() in (2, 4)
        return pointwise and not any(self.geometry.padding) and not any(size % 8 for size in self.weight.shape[:2])

    def multiplies_integers(self) -> bool:
        """Return True if oneDNN's integer kernels take this product on this machine."""
        few_axes = len(self.geometry.stride) in (0, 2) and self.weight[0].numel() <= MOST_INPUTS
        return few_axes and self.geometry.is_exact(self.weight.shape) and not onednn.is_emulated()

    def _fastest(self) -> Callable[[Tensor], Tensor]:
        geometry, weight = self.geometry, self.weight
        if passes_values(weight):
            return self._tried(self._in_bytes() if self._is_of_bytes() else self._in_float())
        if not self.multiplies_integers():
            return self._in_float()
        packed = onednn.PackedWeight(weight, int(self.source.zero), *(geometry if geometry.stride else ()))

        most = FEW // weight.numel() * weight.shape[1] if geometry.groups == 1 else 0
        in_float = functools.cache(self._in_float)

        def run(codes: Tensor) -> Tensor:
            if codes.numel() <= most or geometry.onednn_fault(codes.shape, weight.shape):
                return in_float()(codes)
            sums = packed.sums(_nearest(codes) if geometry.stride else codes)
            if self.sums.proven:
                return sums
            self.sums.proven = torch.equal(sums[:1], self._in_float()(codes[:1]))
            if not self.sums.proven:
                log.warning("oneDNN sums up a product of %s wrongly; it runs in float", tuple(weight.shape))
                self.sums.run = in_float()
            return sums if self.sums.proven else in_float()(codes)

        return run

    def _tried(self, fast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        # A GPU's libraries may round sums of floats: in TF32, or in transforms of small windows.
        def run(codes: Tensor) -> Tensor:
            sums = fast(codes)
            if codes.shape not in self.sums.shapes:  # by which the libraries choose
                exact, found = self._in_float(torch.float64)(codes[:1]), sums[:1]
                if found.dtype is torch.int32:
                    shape = [-1, *[1] * (found.dim() - 2)] if self.geometry.stride else [-1]
                    found = found + self.shift.view(shape)
                if not torch.equal(found.float(), exact):
                    raise RuntimeError(f"a product of {tuple(self.weight.shape)} is not exact in float32 here")
                self.sums.shapes.add(codes.shape)
            return sums

        return run

    def _in_bytes(self) -> Callable[[Tensor], Tensor]:
        # int32 sums of (code - 128) * weight, which `shift` completes.
        geometry, in_float = self.geometry, functools.cache(self._in_float)
        columns = self.weight.flatten(1).t()

        def run(codes: Tensor) -> Tensor:
            if geometry.rows(codes.shape, self.weight.shape) <= 16:  # as cuBLAS demands
                return in_float()(codes)
            if geometry.stride:
                codes = codes[:, :, :: geometry.stride[0], :: geometry.stride[1]].permute(0, 2, 3, 1)
            codes = codes.contiguous()
            rows = codes if codes.dtype is torch.int8 else centered(codes)
            sums = product_of_bytes(rows.flatten(0, -2), columns).view(*rows.shape[:-1], -1)
            return sums.permute(0, 3, 1, 2) if geometry.stride else sums

        return run

    def _in_float(self, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
        # Exact in parts. The whole is rounded to float32 once, as an int32 sum is.
        geometry, source = self.geometry, self.source
        reach = max(source.zero - source.low, source.high - source.zero)
        channels = -len(geometry.stride) - 1
        weight = self.weight.int()
        for parts in range(1, MOST_PARTS + 1 if geometry.groups == 1 else 2):  # the channels of groups do not split
            pieces = weight.tensor_split(parts, 1)
            if all(reach * int(piece.flatten(1).abs().sum(1).max()) <= EXACT for piece in pieces):
                break
        else:
            parts, pieces, dtype = 1, (weight,), torch.float64
        weights = [_nearest(piece.to(dtype)) for piece in pieces]

        def run(codes: Tensor) -> Tensor:
            if codes.dtype is torch.int8:
                codes = (codes.int() + SHIFT).to(torch.uint8)
            x = codes if codes.is_floating_point() else dequantize(_nearest(codes), source, step=False)
            x = x.to(dtype)
            split = zip(x.tensor_split(parts, channels), weights, strict=True)
            first, *others = (geometry.multiply(each, piece, None) for each, piece in split)
            return sum(others, start=first.double()).float() if others else first.float()

        return run


def _nearest(x: Tensor) -> Tensor:
    # Images with channels innermost, as oneDNN takes them and `requantize` wants them.
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format)
