"""Parameters that act as positive numbers, whatever an optimizer makes of them: scales, clipping levels, widths."""

from typing import Any

import torch
from torch import Tensor, nn

from qat.functional import positive_scale, scale_gradient

FLOOR_SHARE = 1 / 32
"""A learned scale acts as at least this share of the one it started from: below it a tensor is as good as switched
off, and with its ReLUs dead no gradient would ever bring it back."""


def overwrite(parameter: Tensor, values: Tensor) -> None:
    """Write values into a parameter without autograd noticing; call it under `torch.no_grad`.

    Through `.data`, so that a quantizer that runs twice in one forward does not invalidate its own graph.
    """
    target = parameter if torch.compiler.is_compiling() else parameter.data
    target.copy_(values)


class PositiveParameters(nn.Module):
    """Base of `Quantizer`: creates, reads, calibrates and repairs such parameters.

    Attributes:
        relative_steps: whether an optimizer's step changes them by a share of themselves; see `QuantSpec.grad_scale`.
    """

    relative_steps: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._positive: list[str] = []

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Scales per group of a convolution have 5 axes, and torch would give them a memory format made for images."""

        def flat(t: Tensor) -> Tensor:
            moved: Tensor = fn(t.flatten()).view(t.shape) if t.dim() == 5 else fn(t)
            return moved

        return super()._apply(flat, recurse)  # type: ignore[no-untyped-call]

    def add_positive(self, name: str, start: Tensor) -> None:
        """Register a parameter that acts as a positive number, at least 1/32 of its calibrated value."""
        setattr(self, name, nn.Parameter(start.clone(memory_format=torch.contiguous_format)))
        self.register_buffer(f"smallest_{name}", start.detach() * FLOOR_SHARE)
        self._positive.append(name)

    def positive(self, name: str) -> Tensor:
        """The parameter of `add_positive` as it acts."""
        value = positive_scale(getattr(self, name), getattr(self, f"smallest_{name}"))
        # A step of the optimizer then multiplies it, as it would with the logarithm as the parameter.
        return scale_gradient(value, value.detach().square()) if self.relative_steps else value

    def set_positive(self, name: str, values: Tensor) -> None:
        """Give the parameter of `add_positive` a calibrated value, in place."""
        getattr(self, name).copy_(values)
        getattr(self, f"smallest_{name}").copy_(getattr(self, name) * FLOOR_SHARE)

    @torch.no_grad()
    def repair(self) -> None:
        """Put back what an optimizer made NaN or infinite: no gradient could bring that back."""
        for name in self._positive:
            parameter, floor = getattr(self, name), getattr(self, f"smallest_{name}")
            overwrite(parameter, torch.where(parameter.isfinite(), parameter, floor / FLOOR_SHARE))

    def curves(self) -> dict[str, Tensor]:
        """What TensorBoard shows of it, name to tensor (its mean is drawn)."""
        return {name: getattr(self, name) for name in self._positive}

    def resting_on_floor(self) -> Tensor | None:
        """How many learned scales are below what they act as; None if none is learned."""
        below = [(getattr(self, name) < getattr(self, f"smallest_{name}")).sum() for name in self._positive]
        return torch.stack(below).sum() if below else None
