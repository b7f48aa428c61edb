"""The geometry of a convolution or linear layer, and when integers pay for it."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.kernels.cpu import onednn

FEWEST_ROWS, FEWEST_ROWS_QUICKLY_PACKED = 512, 160
"""Fewest rows for which integer products save more than packing weights costs.

oneDNN packs three times as fast if it need not sum up the weight for a zero point.
"""

FEWEST_INPUTS = 16
"""Fewest inputs of one output value for which integers pay."""

MOST_INPUTS = 1 << 16
"""Most products of a code and a weight (255 * 128 at most) whose sum fits int32."""

FEWEST_INPUTS_OF_GROUPS, SMALLEST_IN_GROUPS = 32, 1 << 17
"""For grouped convolutions: inputs of one output value, elements of the input."""

SMALLEST_DEPTHWISE, SMALLEST_DEPTHWISE_QUICKLY_PACKED = 3 << 19, 1 << 20
"""Elements of a depthwise convolution's input for which integers pay."""

ROWS_AS_MATRICES = (48, 2048)
"""Rows between which a 1x1 convolution's gradients are fastest as matrix products."""


Sizes: TypeAlias = int | Sequence[int]


class Geometry(NamedTuple):
    """The geometry of a convolution, or of a linear layer, whose lists are empty."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @classmethod
    def of(
        cls, axes: int, stride: Sizes = 1, padding: Sizes | str = 0, dilation: Sizes = 1, groups: int = 1,
        kernel: Sequence[int] = (),
    ) -> "Geometry | None":  # fmt: skip
        """Return the geometry of torch's arguments, or None if the padding has no number."""
        spread = [dilation] * axes if isinstance(dilation, int) else list(dilation)
        if isinstance(padding, str):
            margins = [each * (size - 1) for each, size in zip(spread, kernel, strict=False)]
            if padding == "same" and (not margins or any(margin % 2 for margin in margins)):
                return None
            padding = [margin // 2 for margin in margins] if padding == "same" else 0
        steps, padded = ([size] * axes if isinstance(size, int) else list(size) for size in (stride, padding))
        return cls(steps, padded, spread, groups)

    def packed(self) -> list[int]:
        """Return all numbers in one list, for an operator."""
        return [*self.stride, *self.padding, *self.dilation, self.groups]

    @classmethod
    def unpacked(cls, numbers: list[int]) -> "Geometry":
        """Return the geometry of such a list."""
        axes = len(numbers) // 3
        return cls(numbers[:axes], numbers[axes : 2 * axes], numbers[2 * axes : 3 * axes], numbers[-1])

    def rows(self, x: torch.Size, weight: torch.Size) -> int:
        """Return how many rows the product has as a product of matrices."""
        if not self.stride:
            return math.prod(x[:-1])
        rows = x[0]
        for size, kernel, step, pad, spread in zip(
            x[2:], weight[2:], self.stride, self.padding, self.dilation, strict=True
        ):
            rows *= max((size + 2 * pad - spread * (kernel - 1) - 1) // step + 1, 0)
        return rows

    def integers_refusal(self, x: torch.Size | None, weight: torch.Size, zero: float, copies: int = 1) -> str | None:
        """Return why integers do not pay for a batch of `copies` times x, or None.

        Without x: why they never do. This is a rule, so that a resumed run computes alike.
        """
        kind, inputs = self.kind(weight), math.prod(weight[1:])
        if kind is None:
            return "it is depthwise with several outputs for an input"
        if self.stride and len(self.stride) != 2:
            return f"integers multiply in linear layers and Conv2d, and it has {len(self.stride)} axes"
        if inputs > MOST_INPUTS:
            return f"it sums {inputs} products, and int32 holds {MOST_INPUTS}"
        fewest = {"depthwise": 0, "grouped": FEWEST_INPUTS_OF_GROUPS, "dense": FEWEST_INPUTS}[kind]
        if inputs < fewest:
            return f"float is faster for sums of fewer than {fewest} products, here {inputs}"
        if x is None:
            return None
        if fault := self.onednn_fault(x, weight):
            return f"{fault}, which oneDNN sums up wrongly"
        size, smallest = math.prod(x) * copies, SMALLEST_IN_GROUPS if kind == "grouped" else 0
        if kind == "depthwise":
            smallest = SMALLEST_DEPTHWISE_QUICKLY_PACKED if zero == 0 else SMALLEST_DEPTHWISE
        if size < smallest:
            return f"float is faster for inputs of fewer than {smallest} elements, here {size}"
        if kind == "depthwise":
            return None
        rows = self.rows(x, weight) * copies
        quickly_packed = kind == "dense" and (zero == 0 or math.prod(weight[2:]) == 1)
        least = FEWEST_ROWS_QUICKLY_PACKED if quickly_packed else FEWEST_ROWS
        return None if rows >= least else f"float is faster for fewer than {least} rows, here {rows}"

    def kind(self, weight: torch.Size) -> str | None:
        """Return one of `onednn.KINDS`, or None for what no self-test covers."""
        if self.groups == 1:
            return "dense"
        if weight[1] > 1:
            return "grouped"
        return "depthwise" if weight[0] == self.groups else None

    def is_exact(self, weight: torch.Size) -> bool:
        """Return True if this machine computes integer products of this kind exactly."""
        kind = self.kind(weight)
        return kind is not None and onednn.are_exact(kind)

    def onednn_fault(self, x: torch.Size, weight: torch.Size) -> str | None:
        """Return what of this size oneDNN's integer convolution sums up wrongly, or None."""
        if not self.stride:
            return None
        for size, kernel, step, pad, spread in zip(
            x[2:], weight[2:], self.stride, self.padding, self.dilation, strict=True
        ):
            reach = spread * (kernel - 1) + 1
            firsts = range(-pad, size + pad - reach + 1, step)
            stepped = firsts if spread > size else ()  # only then may it step over all of it
            if pad >= reach or any(all(not 0 <= at < size for at in range(i, i + reach, spread)) for i in stepped):
                return "a window of it lies in the padding alone"
        # with AMX mostly, and now and then with AVX-512 and AVX2 (torch 2.11 to 2.15)
        return "its result is one column, by wider steps" if len(firsts) == 1 and step > 1 and kernel > 1 else None

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product in float."""
        if not self.stride:
            return F.linear(x, weight, bias)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups
        )

    def multiply_integers(
        self, codes: Tensor, step: float, zero: float, weight: Tensor, steps: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the product of codes and an int8 weight, with int32 sums."""
        if not self.stride:
            return onednn.linear(codes, step, zero, weight, steps, bias)
        return onednn.convolution(codes, step, zero, weight, steps, bias, *self)

    def gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of x, weight and bias, None where not needed."""
        if not self.stride:
            return _gradients_of_rows(grad, x, weight, needs)
        if self._is_product_of_rows(grad, x, weight):  # with channels innermost, these are views
            rows, inputs = grad.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)
            of_x, of_weight, of_bias = _gradients_of_rows(rows, inputs, weight.flatten(1), needs)
            of_x = None if of_x is None else of_x.permute(0, 3, 1, 2)
            of_weight = None if of_weight is None else of_weight.as_strided(weight.shape, weight.stride())
            return of_x, of_weight, of_bias
        of_x, of_weight, of_bias = torch.ops.aten.convolution_backward(
            grad, x, weight, [weight.shape[0]], self.stride, self.padding, self.dilation, False,
            [0] * len(self.stride), self.groups, needs,
        )  # fmt: skip
        return of_x, of_weight, of_bias

    def _is_product_of_rows(self, grad: Tensor, x: Tensor, weight: Tensor) -> bool:
        # A 1x1 convolution of few pixels, with channels innermost.
        fewest, most = ROWS_AS_MATRICES
        return (
            self.stride == [1, 1] and self.padding == [0, 0] and self.groups == 1 and weight.shape[2:] == (1, 1)
            and fewest <= self.rows(x.shape, weight.shape) <= most
            and all(t.is_contiguous(memory_format=torch.channels_last) for t in (grad, x))
        )  # fmt: skip

    def layout(self, x: Tensor, weight: Tensor) -> torch.memory_format:
        """Return the memory format of the product.

        Every view that works on torch's own result works on this one. For images it follows torch's rule: channels are
        innermost if those of an operand are. The weight is the one behind its quantizer, which leaves no choice of
        strides. For volumes, where torch has several rules, the format is contiguous.
        """
        if len(self.stride) != 2 or x.dim() != 4:
            return torch.contiguous_format
        of_weight = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
        return torch.channels_last if of_weight or _has_channels_innermost(x) else torch.contiguous_format


LINEAR = Geometry([], [], [], 1)


def _has_channels_innermost(x: Tensor) -> bool:
    # As torch decides (`suggest_memory_format`): by all strides, also those of axes of length 1.
    if not x.stride(1) or not x.numel():
        return False
    least = 0
    for axis in (1, 3, 2):
        if x.stride(axis) < least:
            return False
        least = x.stride(axis) * x.shape[axis]
    return least != x.stride(1) and x.stride(0) >= least


def to_layout(y: Tensor, layout: torch.memory_format) -> Tensor:
    """Return y in a memory format, with torch's strides for axes of length 1.

    oneDNN returns other strides there, and by those torch's kernels mistake the channels of a single image for
    contiguous.
    """
    y = y.contiguous(memory_format=layout)
    inner = layout is torch.channels_last
    strides, step = [0] * y.dim(), 1
    for axis in (1, 3, 2, 0) if inner else range(y.dim() - 1, -1, -1):
        strides[axis] = step
        step *= max(y.shape[axis], 1)
    return y if y.stride() == tuple(strides) else y.as_strided(y.shape, strides)


def _gradients_of_rows(
    grad: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return (
        onednn.product(rows, weight.T).view(x.shape) if needs[0] else None,
        rows.T @ inputs if needs[1] else None,
        rows.sum(0) if needs[2] else None,
    )
