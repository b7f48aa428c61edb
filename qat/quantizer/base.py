"""`Quantizer`: an estimator as a module that owns the learnable grid of one tensor, as PReLU owns its slope."""

import math
import warnings
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from qat.functional import positive_scale, round_ste
from qat.quantizer.observer import RangeObserver
from qat.ranges import scale_and_zero_point
from qat.spec import QuantSpec

Role = Literal["weight", "activation"]

FLOOR_SHARE = 1 / 32
"""A learned scale acts as at least this share of the one it started from: below it a tensor is as good as switched
off, and with its ReLUs dead no gradient would ever bring it back."""

UNCALIBRATED_REACH = 4.0
"""Range of a quantizer that has seen no data yet, in units of its tensor: four deviations of a normalised one."""


class Quantizer(nn.Module):
    """Base of all rules: owns scale and zero_point, knows its grid, and can be calibrated.

    A rule derives from it, implements `quantize(x)` and registers itself; see `register_quantizer`.

    Args:
        spec: the grid.
        role: "weight" or "activation"; decides N in LSQ's gradient factor 1/sqrt(N*qmax).
        shape: shape of scale; () per tensor, e.g. (64, 1, 1, 1) for 64 channels of a convolution weight.
        device: where the parameters live.

    Attributes:
        scale: the learned step, a parameter from construction on; it acts through `positive_scale`.
        smallest_scale: what it acts as at least, 1/32 of the scale that calibration found.
        zero_point: the integer (as float) that stands for 0.0; zero if the grid is symmetric.
        calibrated: whether the range was set from data; saved with the state.
    """

    exportable: ClassVar[bool] = True
    """Whether the output lies on an integer grid that `grid()` describes."""

    scale: Tensor
    smallest_scale: Tensor
    zero_point: Tensor
    calibrated: Tensor

    def __init__(
        self,
        spec: QuantSpec,
        role: Role = "activation",
        shape: tuple[int, ...] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.role: Role = role
        low = -UNCALIBRATED_REACH if spec.signed or not spec.symmetric else 0.0
        scale, zero_point = scale_and_zero_point(torch.tensor(low), torch.tensor(UNCALIBRATED_REACH), spec)
        self.scale = nn.Parameter(scale.expand(shape).clone().to(device))
        self.register_buffer("smallest_scale", self.scale.detach() * FLOOR_SHARE)
        self.register_buffer("zero_point", zero_point.expand(shape).clone().to(device), persistent=not spec.symmetric)
        self.register_buffer("calibrated", torch.tensor(False, device=device))
        self.observer: RangeObserver | None = None
        # The buffer is what checkpoints carry; this copy is what forward reads without a device synchronisation.
        self._is_calibrated = False

    def forward(self, x: Tensor) -> Tensor:
        """Quantize x; while an observer is attached, show x to it and return x as it is."""
        if self.observer is not None:
            self.observer.update(x)
            return x
        if not self._is_calibrated:
            self._warn_uncalibrated()
        return self.quantize(x)

    def quantize(self, x: Tensor) -> Tensor:
        """x on the grid, with the rule's gradients: what a rule implements."""
        raise TypeError(f"{type(self).__name__}: a quantizer must implement quantize(x)")

    def grid(self) -> tuple[Tensor, Tensor]:
        """The (scale, zero_point) in force: scale positive and finite, zero_point an integer of the grid."""
        scale = self.effective_scale()
        # A symmetric grid's zero point is in no checkpoint, so a module made on meta never gets one: it is 0 anyway.
        return scale, torch.zeros_like(self.scale, requires_grad=False) if self.spec.symmetric else self.zero_point

    def effective_scale(self) -> Tensor:
        """The learned scale as it acts: finite, and at least smallest_scale."""
        return positive_scale(self.scale, self.smallest_scale)

    def codes(self, x: Tensor) -> Tensor:
        """The integers of x, as a float tensor: clamp(round(x / scale) + zero_point, qmin, qmax)."""
        scale, zero_point = self.grid()
        wide = torch.promote_types(x.dtype, torch.float32)
        return torch.clamp(round_ste(x.to(wide) / scale) + zero_point, self.spec.qmin, self.spec.qmax)

    @torch.no_grad()
    def set_range(self, low: Tensor, high: Tensor) -> None:
        """Cover low .. high (shape of scale, or one value); in place, so that optimizers keep their parameter.

        Raises:
            ValueError: if a bound is NaN or infinite, or the range wider than float32.
        """
        low, high = (bound.detach().to(self.scale.device, torch.float32) for bound in (low, high))
        if not bool(torch.isfinite(high - low).all()):
            raise ValueError(
                f"set_range: the range must be finite and fit float32, got {low.tolist()}, {high.tolist()}"
            )
        scale, zero_point = scale_and_zero_point(low, high, self.spec)
        if scale.numel() == self.scale.numel():
            scale, zero_point = scale.reshape(self.scale.shape), zero_point.reshape(self.scale.shape)
        self.scale.copy_(scale)
        self.smallest_scale.copy_(self.scale * FLOOR_SHARE)
        self.zero_point.copy_(zero_point)
        self.calibrated.fill_(True)
        self._is_calibrated = True

    @property
    def is_calibrated(self) -> bool:
        """Whether the range was set from data (without touching the device)."""
        return self._is_calibrated

    def gradient_factor(self, x: Tensor) -> float:
        """LSQ's 1/sqrt(N*qmax): N elements that share one scale, of a weight, or of one sample of an activation."""
        choice = self.spec.grad_scale
        if choice == "none" or x.numel() == 0:
            return 1.0
        count = x.numel() // self.scale.numel()
        if self.role == "activation" and choice == "sample" and x.dim() > 1:
            count //= x.shape[0]
        return 1.0 / math.sqrt(max(count, 1) * self.spec.qmax)

    def extra_repr(self) -> str:
        """The grid, for print(model)."""
        return f"{self.spec.rule}, {self.spec}"

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not self.calibrated.is_meta:
            self._is_calibrated = bool(self.calibrated)

    def _warn_uncalibrated(self) -> None:
        warnings.warn(
            f"a quantizer ({self.spec}) runs on its default range of up to {UNCALIBRATED_REACH:g};"
            " call qat.calibrate(model, batches) first",
            stacklevel=3,
        )
