"""Integer grid of one tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from qat.text import check_types

Role = Literal["weight", "activation"]
Granularity = Literal["tensor", "channel", "group"]
RangeInit = Literal["minmax", "percentile", "mse", "lsq"]
GradScale = Literal["sample", "batch", "none", "relative"]
EWGS = Literal["none", "fixed", "hessian"]

Fields = Mapping[str, Any]  # values by the names of a class's fields
UNSET: Any = None  # a field that the spec leaves open; where None is a choice of its own, the field says so


@dataclass(frozen=True, repr=False)
class QuantSpec:
    """Integer grid, and the rule by which a tensor is put on it.

    A value x becomes the integer q = clamp(round(x / scale) + zero_point, qmin, qmax), which stands for
    (q - zero_point) * scale. The spec says which integers there are; scale and zero_point belong to a quantizer.

    A field that is left out is left open: it is None until the target of a recipe, or the role of the tensor in a
    single layer, chooses it. So `QuantSpec(bits=4)` means four bits: of a weight symmetric, narrow and per channel, of
    an activation unsigned with a zero point, where the target does not say otherwise. A quantizer's spec is complete.

    Args:
        bits: width of the integers, 1 to 16; rules have their own limits within.
        signed: integers -2^(bits-1) .. 2^(bits-1)-1 if true, 0 .. 2^bits-1 if false.
        symmetric: zero_point is 0. If false (affine) it is any integer of the grid, so 0.0 stays exact.
        granularity: "tensor" for one scale, "channel" for one along the channel axis (weights: axis 0), "group" for
            one per channel and `group_size` neighbours along the input axis (weights: axis 1).
        group_size: with granularity="group", how many inputs share a scale; it has to divide their number.
        rule: name of a registered quantizer; see `qat.register_quantizer`.
        options: what this rule takes besides, by name; each quantizer class says what it takes (`options_type`).
        narrow_range: leave out the lowest signed integer, so that the grid is its own mirror image. Left open, weights
            of 2 and 3 bits do not: at 2 bits it is the difference between three levels and four.
        init: how the first range is found: "minmax", "percentile", "mse" or "lsq" (2*mean|x|/sqrt(qmax)).
        percentile: with init="percentile", the percent of values below the upper bound, and above the lower one.
        grad_scale: N in LSQ's factor 1/sqrt(N*qmax) on the gradient of an activation's scale: elements per
            "sample" (the paper), per "batch" (of all ranks), or "none" for a factor of 1 (weights too; left open,
            `pact` has it, whose gradient weighs against its decay). "relative": the factor is scale^2, so that a step
            changes the scale by a share of itself, as if its logarithm were learned.
        ewgs: element-wise gradient scaling (arXiv:2104.00903) on top of a uniform rule: "none", "fixed" with
            `ewgs_delta`, or "hessian" with a delta that `qat.update_ewgs` finds from the trace of the Hessian.
        ewgs_delta: delta of ewgs="fixed", >= 0, for residuals as a share of the grid's range; the paper's are 1e-3
            to 0.2. None: 1e-3.
        max_magnitude: the largest integer of the grid and, if signed, its negative: 64 keeps 8 bits to -64 .. 64, of
            which ONNX Runtime adds two products exactly on every processor. Fewer bits than that are not affected;
            None: all that the bits hold.

    Attributes:
        qmin, qmax: lowest and highest integer of the grid; left open, it counts as 8 bits, signed, and not narrow.

    >>> four_bits = QuantSpec(bits=4)
    >>> four_bits
    QuantSpec(bits=4)
    >>> print(four_bits.resolved(default_spec("weight")))
    int4 narrow symmetric per channel
    >>> print(four_bits.resolved(default_spec("activation")))
    uint4 affine per tensor
    >>> QuantSpec(bits=4, signed=False).qmax
    15
    """

    bits: int = UNSET
    signed: bool = UNSET
    symmetric: bool = UNSET
    granularity: Granularity = UNSET
    rule: str = UNSET
    narrow_range: bool = UNSET
    init: RangeInit = UNSET
    percentile: float = UNSET
    grad_scale: GradScale = UNSET
    group_size: int | None = None
    options: Fields = field(default=UNSET, hash=False)
    ewgs: EWGS = UNSET
    ewgs_delta: float | None = None
    max_magnitude: int | None = None

    def __post_init__(self) -> None:
        given = self.given()
        bits, percentile = given.get("bits", 8), given.get("percentile", 100)
        check_types(QuantSpec, given)
        if not 1 <= bits <= 16:
            raise ValueError(f"QuantSpec: bits must be a whole number from 1 to 16, got {bits!r}")
        if not 50 < percentile <= 100:
            raise ValueError(f"QuantSpec: percentile must be above 50 and at most 100, got {percentile!r}")
        self._check_group()
        delta = self.ewgs_delta
        if delta is not None and not 0 <= delta < float("inf"):
            raise ValueError(f"QuantSpec: ewgs_delta must be at least 0 and finite, got {delta!r}")
        if delta is not None and self.ewgs not in ("fixed", UNSET):
            raise ValueError(f"QuantSpec: ewgs_delta={delta!r} has no effect with ewgs={self.ewgs!r}; use ewgs='fixed'")
        most = self.max_magnitude
        if most is not None and most < 1:
            raise ValueError(f"QuantSpec: max_magnitude must be a whole number of at least 1 or None, got {most!r}")
        if self.narrow_range and self.signed is False:  # signed may be open
            raise ValueError("QuantSpec: narrow_range=True needs signed=True; an unsigned grid has no mirror image")
        signed = self.signed is not False
        low = int(self.narrow_range is True) - 2 ** (bits - 1) if signed else 0
        high = 2 ** (bits - int(signed)) - 1
        # The dataclass is frozen.
        object.__setattr__(self, "qmin", low if most is None else max(low, -most))
        object.__setattr__(self, "qmax", high if most is None else min(high, most))

    def _check_group(self) -> None:
        size, granularity = self.group_size, self.granularity
        if size is not None and granularity not in ("group", UNSET):
            raise ValueError(
                f"QuantSpec: group_size={size!r} has no effect with granularity={granularity!r};"
                " use granularity='group'"
            )
        grouped = granularity == "group" or size is not None
        if grouped and (size is None or size < 1):
            raise ValueError(f"QuantSpec: granularity='group' needs a group_size of at least 1, got {size!r}")

    if TYPE_CHECKING:  # attributes that `__post_init__` sets: a quantizer reads them at every call

        @property
        def qmin(self) -> int:
            """Lowest integer of the grid."""

        @property
        def qmax(self) -> int:
            """Highest integer of the grid."""

    def given(self) -> dict[str, Any]:
        """Return the fields that are not left open, by name.

        >>> QuantSpec(bits=4, init="mse").given()
        {'bits': 4, 'init': 'mse'}
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not UNSET}

    def resolved(self, default: "QuantSpec") -> "QuantSpec":
        """Return the complete spec, with the default's choice for what is left open.

        A complete spec stays as it is. The default is the grid of a target (`recipe.profile.weight`), or of a role
        (`default_spec("weight")`); what is given and does not go with it is a ValueError.
        """
        given = self.given()
        return self if given.keys() >= _REQUIRED else default.changed(given)

    def changed(self, change: Fields) -> "QuantSpec":
        """Return the spec with other values of some fields.

        What belongs to the old values is reset, unless it is given too: the options of another rule and its
        `grad_scale`, the group size without groups, the delta of a fixed EWGS, the narrow range of an unsigned grid and
        of one of 2 or 3 bits (a fourth or an eighth of all integers, which needs no mirror image: int8 and int4 hold
        that; from few bits to more it comes back), and below 8 bits the extremes as a range: they leave most values on
        zero.

        None leaves a field as it is, but for group_size, ewgs_delta and max_magnitude, where it is a choice. Values
        that do not go together are a ValueError.

        >>> print(default_spec("weight").changed({"signed": False}))
        uint8 symmetric per channel
        >>> print(default_spec("weight").changed({"bits": 2}))
        int2 symmetric per channel
        """
        change = {name: value for name, value in change.items() if value is not UNSET or name not in _REQUIRED}
        check_types(QuantSpec, change)
        dropped: dict[str, Any] = {}
        if change.get("rule", self.rule) != self.rule:
            dropped |= {"options": {}, "grad_scale": "none" if change["rule"] == "pact" else "sample"}
        if change.get("ewgs", "fixed") != "fixed":
            dropped["ewgs_delta"] = None
        if change.get("granularity", "group") != "group":
            dropped["group_size"] = None
        dropped |= self._of_other_bits(change)
        if change.get("signed", self.signed) is False:
            dropped["narrow_range"] = False
        return replace(self, **{**dropped, **change})

    def _of_other_bits(self, change: Fields) -> dict[str, Any]:
        old, new = self.bits, change.get("bits")
        if old is None or new is None or old == new:  # open ones are chosen by the role's spec
            return {}
        found: dict[str, Any] = {}
        if self.narrow_range is narrow_by_bits(old):  # else it was chosen
            found["narrow_range"] = narrow_by_bits(new)
        follows_extremes = change.get("rule", self.rule) in ("minmax", "ema")  # whatever range they start from
        if new < 8 <= old and self.init == "minmax" and not follows_extremes:
            found["init"] = "mse"
        return found

    def __repr__(self) -> str:
        return f"QuantSpec({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"

    def __str__(self) -> str:
        if not self.given().keys() >= _REQUIRED:
            return repr(self)
        kind = f"{'int' if self.signed else 'uint'}{self.bits}"
        if self.max_magnitude is not None and self.max_magnitude in (self.qmax, -self.qmin):
            kind += f" in {self.qmin}..{self.qmax}"
        elif self.narrow_range:
            kind += " narrow"
        share = f"group of {self.group_size}" if self.granularity == "group" else self.granularity
        return f"{kind} {'symmetric' if self.symmetric else 'affine'} per {share}"


def narrow_by_bits(bits: int) -> bool:
    """Return the default of `narrow_range`: True but for 2 and 3 bits."""
    return bits not in (2, 3)


# The fields of a complete spec; None is a choice of the others.
_REQUIRED = {each.name for each in fields(QuantSpec)} - {"group_size", "ewgs_delta", "max_magnitude"}


def default_weight_spec() -> QuantSpec:
    """Return the spec of weights: 8 bits per output channel, symmetric, narrow range."""
    return QuantSpec(  # narrow, since a BatchNorm with gamma < 0 negates it exactly
        bits=8, signed=True, symmetric=True, granularity="channel", rule="lsq", narrow_range=True, init="minmax",
        percentile=99.99, grad_scale="sample", options={}, ewgs="none",
    )  # fmt: skip


def default_activation_spec() -> QuantSpec:
    """Return the spec of activations: 8 bits, unsigned, with a zero point."""
    # On x86, ONNX Runtime runs no others fully in integers.
    change = {"signed": False, "symmetric": False, "granularity": "tensor", "init": "mse"}
    return default_weight_spec().changed(change)


def default_spec(role: Role) -> QuantSpec:
    """Return the grid of a tensor for which neither a target nor a spec says more.

    >>> print(default_spec("activation"))
    uint8 affine per tensor
    """
    return default_weight_spec() if role == "weight" else default_activation_spec()
