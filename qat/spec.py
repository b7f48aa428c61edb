"""The integer grid of one tensor (`QuantSpec`) and the choice of grids for a whole model (`QuantRecipe`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

Granularity = Literal["tensor", "channel", "group"]
RangeInit = Literal["minmax", "percentile", "mse", "lsq"]
GradScale = Literal["sample", "batch", "none", "relative"]
EWGS = Literal["none", "fixed", "hessian"]
Target = Literal["onnxruntime"]


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

    Raises:
        ValueError: for values outside these.

    >>> QuantSpec(bits=8).qmin, QuantSpec(bits=8).qmax
    (-128, 127)
    >>> QuantSpec(bits=4, signed=False).qmax
    15
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
        if self.narrow_range and not self.signed:
            raise ValueError("QuantSpec: narrow_range=True needs signed=True; an unsigned grid has no mirror image")

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

    @property
    def qmin(self) -> int:
        """Lowest integer of the grid."""
        return -(2 ** (self.bits - 1)) + int(self.narrow_range) if self.signed else 0

    @property
    def qmax(self) -> int:
        """Highest integer of the grid."""
        return int(2 ** (self.bits - int(self.signed)) - 1)

    def __str__(self) -> str:
        kind = f"{'int' if self.signed else 'uint'}{self.bits}{' narrow' if self.narrow_range else ''}"
        share = f"group of {self.group_size}" if self.granularity == "group" else self.granularity
        return f"{kind} {'symmetric' if self.symmetric else 'affine'} per {share}"


_CHOICES: dict[str, Any] = {"granularity": Granularity, "init": RangeInit, "grad_scale": GradScale, "ewgs": EWGS}


def default_weight_spec() -> QuantSpec:
    """8 bits per output channel, symmetric, narrow range: a BatchNorm with gamma < 0 negates it exactly."""
    return QuantSpec(bits=8, signed=True, symmetric=True, granularity="channel", narrow_range=True)


def default_activation_spec() -> QuantSpec:
    """8 bits unsigned with a zero point: the only activations that ONNX Runtime runs fully in integers on x86."""
    return QuantSpec(bits=8, signed=False, symmetric=False, granularity="tensor", init="mse")


def _changed(spec: QuantSpec, change: Mapping[str, Any]) -> QuantSpec:
    """The spec with some fields changed; options of another rule, and a group size without groups, do not stay."""
    dropped: dict[str, Any] = {}
    if change.get("rule", spec.rule) != spec.rule:
        dropped["options"] = {}
    if change.get("ewgs", "fixed") != "fixed":
        dropped["ewgs_delta"] = None
    if change.get("granularity", "group") != "group":
        dropped["group_size"] = None
    return replace(spec, **{**dropped, **change})


@dataclass(frozen=True)
class LayerRecipe:
    """What a recipe says about one layer: the grid of its weight, the grid of its input, or that it stays float."""

    weight: QuantSpec
    activation: QuantSpec
    skipped_by: str | None = None


@dataclass(frozen=True)
class QuantRecipe:
    """Which grid every tensor of a model gets.

    Args:
        weight: grid of weights.
        activation: grid of activations.
        overrides: patterns of layer names (shell style: `conv1`, `layer1.*`, `*.downsample.0`) mapped to what
            differs there: {"weight": {...}, "activation": {...}, "skip": True}. "activation" is the grid of the
            layer's input. Later patterns win. A pattern that names no layer is an error when the model is prepared.
            Another rule starts from its own options, another granularity than "group" has no group_size.
        target: the runtime that the grids are made for.

    Raises:
        ValueError: for an unknown target or override key, or a grid that the target does not run.

    >>> first_and_last = {"activation": {"bits": 8}, "weight": {"bits": 8}}
    >>> recipe = QuantRecipe(weight=QuantSpec(bits=4, granularity="channel"), overrides={"conv1": first_and_last})
    >>> recipe.for_layer("conv1").weight.bits, recipe.for_layer("layer1.0.conv1").weight.bits
    (8, 4)
    """

    weight: QuantSpec = field(default_factory=default_weight_spec)
    activation: QuantSpec = field(default_factory=default_activation_spec)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    target: Target = "onnxruntime"

    def __post_init__(self) -> None:
        if self.target not in get_args(Target):
            raise ValueError(f"QuantRecipe: target must be one of {', '.join(get_args(Target))}, got {self.target!r}")
        for pattern in self.overrides:
            self._check_override(pattern)
        self._check_target(self.weight, self.activation, "QuantRecipe")
        for pattern in self.overrides:
            layer = self._apply(LayerRecipe(self.weight, self.activation), pattern)
            self._check_target(layer.weight, layer.activation, f"QuantRecipe: overrides[{pattern!r}]")

    def for_layer(self, name: str) -> LayerRecipe:
        """The grids of the layer with this name, all overrides applied."""
        layer = LayerRecipe(self.weight, self.activation)
        for pattern in self.overrides:
            if fnmatchcase(name, pattern):
                layer = self._apply(layer, pattern)
        return layer

    def _apply(self, layer: LayerRecipe, pattern: str) -> LayerRecipe:
        change = self.overrides[pattern]
        grids = {}
        for key in ("weight", "activation"):
            try:
                grids[key] = _changed(getattr(layer, key), change.get(key, {}))
            except ValueError as error:
                raise ValueError(f"QuantRecipe: overrides[{pattern!r}][{key!r}]: {error}") from error
        return LayerRecipe(
            **grids,
            skipped_by=layer.skipped_by if "skip" not in change else pattern if change["skip"] else None,
        )

    def _check_override(self, pattern: str) -> None:
        known = {spec_field.name for spec_field in fields(QuantSpec)}
        where = f"QuantRecipe: overrides[{pattern!r}]"
        if not isinstance(self.overrides[pattern], Mapping):
            raise ValueError(f"{where}: must be a mapping, got {self.overrides[pattern]!r}")
        for key, value in self.overrides[pattern].items():
            if key in ("weight", "activation") and not isinstance(value, Mapping):
                raise ValueError(f"{where}[{key!r}]: must be a mapping, got {value!r}")
            if key not in ("weight", "activation", "skip"):
                raise ValueError(
                    f"QuantRecipe: overrides[{pattern!r}]: unknown key {key!r}; valid: weight, activation, skip"
                )
            unknown = sorted(set(value) - known) if key != "skip" else []
            if unknown:
                raise ValueError(
                    f"QuantRecipe: overrides[{pattern!r}][{key!r}]: unknown key {unknown[0]!r};"
                    f" valid: {', '.join(sorted(known))}"
                )

    def _check_target(self, weight: QuantSpec, activation: QuantSpec, where: str) -> None:
        """ONNX Runtime's integer kernels: per-tensor activations, symmetric weights, 8-bit containers."""
        if activation.granularity != "tensor":
            raise ValueError(
                f"{where}: activation granularity {activation.granularity!r} has no integer kernel in"
                f" {self.target}; use 'tensor'"
            )
        if not weight.symmetric:
            rule = " and rule='lsq'" if weight.rule == "lsq_plus" else ""
            raise ValueError(f"{where}: an affine weight has no exact BatchNorm folding; use symmetric=True{rule}")
