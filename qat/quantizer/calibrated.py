"""Parameters that calibration sets and that act as positive numbers: scales, clipping levels, widths."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qat.quantizer.switching import Switchable
from qat.ranges import initial_range, scale_and_zero_point
from qat.spec import QuantSpec
from qat.torch_internals import note_in_state

FLOOR_SHARE = 1 / 32
"""A learned scale acts as at least this share of the one it started from: below it a tensor is as good as switched
off, and with its ReLUs dead no gradient would ever bring it back."""


INTEGERS = "integers"
"""What a state dict notes of a quantizer beside its version: the lowest and the highest integer of its spec."""


class Family:
    """What the quantizers of one model share: the names of those without a range, of which the model warns once.

    Attributes:
        uncalibrated: their names, in the order of the model.
        warned: whether the warning was given.
    """

    def __init__(self) -> None:
        self.uncalibrated: dict[str, None] = {}
        self.warned = False

    def who_runs(self) -> str:
        """The beginning of the warning: the first three names, and how many there are besides."""
        names = list(self.uncalibrated)
        if len(names) == 1:
            return f"the quantizer {names[0]!r} runs on its"
        others = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"the quantizers {', '.join(map(repr, names[:3]))}{others} run on their"


@contextmanager
def taken_for_calibrated(model: nn.Module) -> Iterator[None]:
    """A context in which no quantizer of the model warns that it has no range yet."""
    without = [each for each in model.modules() if isinstance(each, CalibratedParameters) and not each.is_calibrated]
    try:
        for each in without:
            each.is_calibrated = True
        yield
    finally:
        for each in without:
            each.is_calibrated = False


class CalibratedParameters(Switchable):
    """Base of `Quantizer`: creates such parameters and sets them from data."""

    family: Family | None = None
    """Shared by the quantizers of a prepared model; None for one of a layer of your own."""

    family_name: str = ""
    """Its name in the model."""

    spec: QuantSpec
    shape: tuple[int, ...]
    zero_point: Tensor | None
    calibrated: Tensor
    is_calibrated: bool

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

    def set_positive(self, name: str, values: Tensor) -> None:
        """Give the parameter of `add_positive` a calibrated value, in place."""
        getattr(self, name).copy_(values)
        getattr(self, f"smallest_{name}").copy_(getattr(self, name) * FLOOR_SHARE)

    def curves(self) -> dict[str, Tensor]:
        """What TensorBoard shows of it, name to tensor (its mean is drawn)."""
        return {name: getattr(self, name) for name in self._positive}

    def positive_parameters(self) -> list[Tensor]:
        """The parameters of `add_positive`."""
        return [getattr(self, name) for name in self._positive]

    def resting_on_floor(self) -> Tensor | None:
        """How many learned scales are below what they act as; None if none is learned."""
        below = [(getattr(self, name) < getattr(self, f"smallest_{name}")).sum() for name in self._positive]
        return torch.stack(below).sum() if below else None

    def fit(self, values: Tensor, elements: int | None = None) -> None:
        """Set the range from values of shape (scales, elements), as `spec.init` says.

        Args:
            values: of a weight all, of an activation a sample.
            elements: of the whole weight, or of one sample of the activation; None: as many as there are values.

        Raises:
            ValueError: for NaN or infinity, no values, or negative ones on a grid that has none.
        """
        low, high = initial_range(values, self.spec)
        if self.spec.symmetric and not self.spec.signed and bool((low < 0).any()):
            raise ValueError(
                f"values down to {values.min():.3g}, which its grid ({self.spec}) cannot hold; use signed=True or"
                " symmetric=False"
            )
        self.set_range(low, high)

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor) -> None:
        """Cover low .. high (shape of scale, or one value); in place, so that optimizers keep their parameter.

        Raises:
            ValueError: if a bound is NaN or infinite, or the range wider than float32.
        """
        scale, zero_point = scale_and_zero_point(*self.checked_range(low, high), self.spec)
        self.set_positive("scale", scale)
        if self.zero_point is not None:
            self.zero_point.copy_(zero_point)
        self.mark_calibrated()

    def checked_range(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Both bounds, finite, in the shape of the scales, where they live.

        Raises:
            ValueError: if a bound is NaN or infinite, or the range wider than float32.
        """
        low, high = (bound.detach().to(self.calibrated.device, torch.float32) for bound in (low, high))
        if not bool(torch.isfinite(high - low).all()):
            raise ValueError(
                f"set_range: the range must be finite and fit float32, got {low.tolist()}, {high.tolist()}"
            )
        low, high = (
            bound.reshape(self.shape) if bound.numel() == math.prod(self.shape) else bound for bound in (low, high)
        )
        return low.expand(self.shape), high.expand(self.shape)

    def mark_calibrated(self) -> None:
        """Remember that the range comes from data."""
        self.calibrated.fill_(True)
        self._note(True)

    def join(self, family: Family, name: str) -> None:
        """Be one of a model's quantizers, under this name."""
        self.family, self.family_name = family, name
        self._note(self.is_calibrated)

    def _note(self, is_calibrated: bool) -> None:
        self.is_calibrated = is_calibrated
        if self.family is not None and is_calibrated:
            self.family.uncalibrated.pop(self.family_name, None)
        elif self.family is not None:
            self.family.uncalibrated[self.family_name] = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note_in_state(destination, prefix, INTEGERS, [self.spec.qmin, self.spec.qmax])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        integers = [self.spec.qmin, self.spec.qmax]
        if local_metadata.get(INTEGERS, integers) != integers:  # a range made for other bits is none for these
            self.calibrated = torch.zeros_like(self.calibrated)
        if not self.calibrated.is_meta:
            self._note(bool(self.calibrated))
