"""The integer grid of one tensor: `QuantSpec`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

Granularity = Literal["tensor", "channel", "group"]
RangeInit = Literal["minmax", "percentile", "mse", "lsq"]
GradScale = Literal["sample", "batch", "none", "relative"]
EWGS = Literal["none", "fixed", "hessian"]


@dataclass(frozen=True)
class QuantSpec:
    """An integer grid and the rule by which a tensor is put on it.

    A value x becomes the integer q = clamp(round(x / scale) + zero_point, qmin, qmax), which stands for
    (q - zero_point) * scale. The spec says which integers there are; scale and zero_point belong to a quantizer.

    Args:
        bits: width of the integers, 1 to 16; rules have their own limits within.
        signed: integers -2^(bits-1) .. 2^(bits-1)-1 if true, 0 .. 2^bits-1 if false.
        symmetric: zero_point is 0. If false (affine) it is any integer of the grid, so 0.0 stays exact.
        granularity: "tensor" for one scale, "channel" for one along the channel axis (weights: axis 0), "group" for
            one per channel and `group_size` neighbours along the input axis (weights: axis 1).
        group_size: with granularity="group", how many inputs share a scale; it has to divide their number.
        rule: name of a registered quantizer; see `qat.register_quantizer`.
        options: what this rule takes besides, by name; each quantizer class says what it takes (`options_type`).
        narrow_range: leave out the lowest signed integer, so that the grid is its own mirror image.
        init: how the first range is found: "minmax", "percentile", "mse" or "lsq" (2*mean|x|/sqrt(qmax)).
        percentile: with init="percentile", the percent of values below the upper bound, and above the lower one.
        grad_scale: N in LSQ's factor 1/sqrt(N*qmax) on the gradient of an activation's scale: elements per
            "sample" (the paper), per "batch", or "none" for a factor of 1 (weights too). "relative": the factor is
            scale^2, so that a step changes the scale by a share of itself, as if its logarithm were learned.
        ewgs: element-wise gradient scaling (arXiv:2104.00903) on top of a uniform rule: "none", "fixed" with
            `ewgs_delta`, or "hessian" with a delta that `qat.update_ewgs` finds from the trace of the Hessian.
        ewgs_delta: delta of ewgs="fixed", >= 0, for residuals as a share of the grid's range; the paper's are 1e-3
            to 0.2. None: 1e-3.
        max_magnitude: the largest integer of the grid and, if signed, its negative: 64 keeps 8 bits to -64 .. 64, of
            which ONNX Runtime adds two products exactly on every processor. Fewer bits than that are not affected;
            None: all that the bits hold.

    Attributes:
        qmin, qmax: lowest and highest integer of the grid.

    Raises:
        ValueError: for values outside these.

    >>> QuantSpec(bits=8).qmin, QuantSpec(bits=8).qmax
    (-128, 127)
    >>> QuantSpec(bits=4, signed=False).qmax
    15
    >>> print(QuantSpec(bits=8, max_magnitude=64))
    int8 in -64..64 symmetric per tensor
    """

    bits: int = 8
    signed: bool = True
    symmetric: bool = True
    granularity: Granularity = "tensor"
    rule: str = "lsq"
    narrow_range: bool = False
    init: RangeInit = "minmax"
    percentile: float = 99.99
    grad_scale: GradScale = "sample"
    group_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    ewgs: EWGS = "none"
    ewgs_delta: float | None = None
    max_magnitude: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 1 <= self.bits <= 16:
            raise ValueError(f"QuantSpec: bits must be a whole number from 1 to 16, got {self.bits!r}")
        if not isinstance(self.percentile, (int, float)) or not 50 < self.percentile <= 100:
            raise ValueError(f"QuantSpec: percentile must be above 50 and at most 100, got {self.percentile!r}")
        for name, choices in _CHOICES.items():
            value, allowed = getattr(self, name), get_args(choices)
            if value not in allowed:
                raise ValueError(f"QuantSpec: {name} must be one of {', '.join(allowed)}, got {value!r}")
        self._check_group()
        self._check_ewgs()
        if not isinstance(self.options, Mapping):
            raise ValueError(f"QuantSpec: options must be a mapping of names to values, got {self.options!r}")
        most = self.max_magnitude
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ValueError(f"QuantSpec: max_magnitude must be a whole number of at least 1 or None, got {most!r}")
        if self.narrow_range and not self.signed:
            raise ValueError("QuantSpec: narrow_range=True needs signed=True; an unsigned grid has no mirror image")
        low = -(2 ** (self.bits - 1)) + int(self.narrow_range) if self.signed else 0
        high = int(2 ** (self.bits - int(self.signed)) - 1)
        object.__setattr__(self, "qmin", low if most is None else max(low, -most))
        object.__setattr__(self, "qmax", high if most is None else min(high, most))

    def _check_group(self) -> None:
        size = self.group_size
        if self.granularity != "group":
            if size is not None:
                raise ValueError(
                    f"QuantSpec: group_size={size!r} has no effect with granularity={self.granularity!r};"
                    " use granularity='group'"
                )
        elif isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"QuantSpec: granularity='group' needs a group_size of at least 1, got {size!r}")

    def _check_ewgs(self) -> None:
        delta = self.ewgs_delta
        if delta is not None and (not isinstance(delta, (int, float)) or not 0 <= delta < float("inf")):
            raise ValueError(f"QuantSpec: ewgs_delta must be at least 0 and finite, got {delta!r}")
        if delta is not None and self.ewgs != "fixed":
            raise ValueError(f"QuantSpec: ewgs_delta={delta!r} has no effect with ewgs={self.ewgs!r}; use ewgs='fixed'")

    if TYPE_CHECKING:  # attributes that `__post_init__` sets: a quantizer reads them at every call

        @property
        def qmin(self) -> int:
            """Lowest integer of the grid."""

        @property
        def qmax(self) -> int:
            """Highest integer of the grid."""

    def __str__(self) -> str:
        kind = f"{'int' if self.signed else 'uint'}{self.bits}"
        if self.max_magnitude is not None and self.max_magnitude in (self.qmax, -self.qmin):
            kind += f" in {self.qmin}..{self.qmax}"
        elif self.narrow_range:
            kind += " narrow"
        share = f"group of {self.group_size}" if self.granularity == "group" else self.granularity
        return f"{kind} {'symmetric' if self.symmetric else 'affine'} per {share}"


_CHOICES: dict[str, Any] = {"granularity": Granularity, "init": RangeInit, "grad_scale": GradScale, "ewgs": EWGS}


def default_weight_spec() -> QuantSpec:
    """8 bits per output channel, symmetric, narrow range: a BatchNorm with gamma < 0 negates it exactly."""
    return QuantSpec(bits=8, signed=True, symmetric=True, granularity="channel", narrow_range=True)


def default_activation_spec() -> QuantSpec:
    """8 bits unsigned with a zero point: the only activations that ONNX Runtime runs fully in integers on x86."""
    return QuantSpec(bits=8, signed=False, symmetric=False, granularity="tensor", init="mse")
