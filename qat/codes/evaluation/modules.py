"""The modules of an integer program besides its products."""

import math
from typing import cast

import torch
from torch import Tensor, nn

from qat.codes.evaluation import arithmetic
from qat.codes.evaluation.arithmetic import CodeGrid
from qat.codes.operators.pool import LARGEST_WINDOW, max_pool_codes
from qat.functional.tensors import require_floating
from qat.integers.frozen import NotANumberError
from qat.kernels.dispatch import passes_values, plain_here


class Quantize(nn.Module):
    """Quantizes floats; raises NotANumberError, and TypeError for other tensors."""

    def __init__(self, to: CodeGrid, name: str = "") -> None:
        super().__init__()
        self.grid, self.name = to, name
        self.seen: Tensor | None = None  # on a GPU: becomes NaN where a value is

    def forward(self, x: Tensor) -> Tensor:
        """Return the uint8 codes of floats."""
        codes, has_nan = arithmetic.quantize(require_floating(x, self.name), self.grid, self.seen)
        if has_nan:
            raise NotANumberError(self.name)
        return codes


class Dequantize(nn.Module):
    """Computes (codes - zero) * step."""

    def __init__(self, source: CodeGrid) -> None:
        super().__init__()
        self.source = source

    def forward(self, codes: Tensor) -> Tensor:
        """Return the floats of uint8 codes."""
        return arithmetic.dequantize(codes, self.source)


class AsGiven(nn.Module):
    """Returns a tensor in the memory format of the model's input."""

    def forward(self, x: Tensor, given: object) -> Tensor:
        """Return x, contiguous unless `given` is a tensor that is not."""
        return x if isinstance(given, Tensor) and not given.is_contiguous() else x.contiguous()


class Join(nn.Module):
    """Adds or multiplies two tensors of codes: codes of clamp(a + b, *clip), or a * b."""

    def __init__(self, kind: str, sources: tuple[CodeGrid, CodeGrid], to: CodeGrid, clip: tuple[float, float]) -> None:
        super().__init__()
        self.operation, self.sources, self.grid, self.clip, self.kind = kind, sources, to, clip, torch.uint8

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return codes of codes, in the dtype that their readers want."""
        join = arithmetic.add if self.operation == "add" else arithmetic.multiply
        codes = join(a, b, self.sources, self.grid, self.clip, self.kind)
        return codes if codes.dtype is self.kind else arithmetic.centered(codes)


class Table(nn.Module):
    """A function of one value, from one grid to another, as 256 bytes."""

    def __init__(self, codes: Tensor) -> None:
        super().__init__()
        self.codes = nn.Buffer(codes)

    def forward(self, codes: Tensor) -> Tensor:
        """Return uint8 codes of uint8 codes."""
        return arithmetic.look_up(codes, self.codes)


class MaxPool(nn.Module):
    """Returns the largest code of every window; `window` is a `Window.packed`."""

    def __init__(self, window: list[int]) -> None:
        super().__init__()
        self.window = window

    def forward(self, codes: Tensor) -> Tensor:
        """Return uint8 codes of uint8 codes, (N, C, H, W) or (C, H, W)."""
        if codes.dim() == 3:
            return cast("Tensor", self(codes[None])[0])
        if math.prod(self.window[:2]) > LARGEST_WINDOW or passes_values(codes):
            kernel, stride, padding, dilation = (self.window[k : k + 2] for k in (0, 2, 4, 6))
            pooled = torch.max_pool2d(codes.float(), kernel, stride, padding, dilation, bool(self.window[8]))
        else:
            pooled = (max_pool_codes.formula if plain_here() else max_pool_codes)(codes, self.window)[0]
        return pooled.to(torch.uint8)
