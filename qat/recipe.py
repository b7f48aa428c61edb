"""Recipe: the grids of a whole model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from qat.spec import UNSET, Fields, QuantSpec, Role
from qat.targets import TargetProfile, profile_of
from qat.text import check_types, unknown_name

if TYPE_CHECKING:
    from torch import nn

Position = Literal["first", "last"]

# Least bits of tensors that sums and averages read, by default: ResNet-20 W2A2 gains 7 points (docs/measurements.md).
RESIDUAL_BITS = 8
TYPE_PREFIX = "type:"  # of an override's key that names classes of layers


@dataclass(frozen=True)
class LayerRecipe:
    """Recipe of one layer."""

    weight: QuantSpec
    activation: QuantSpec  # of its input
    skipped_by: str | None = None  # the pattern that leaves it in float


class Override(TypedDict):
    """Changes under a key of `overrides`."""

    weight: Fields
    activation: Fields
    skip: bool


@dataclass(frozen=True)
class QuantRecipe:
    """Grids of all tensors of a model.

    Args:
        weight: grid of weights: a spec, or a mapping of its fields. The target chooses what it leaves open.
            None leaves all open.
        activation: grid of activations, in the same way. None is not float: for activations in float, switch their
            quantizers off, `qat.disable_fake_quant(model, weights=False)`.
        overrides: layers mapped to their differences: {"weight": {...}, "activation": {...}, "skip": True}. A key is a
            pattern of layer names (shell style: `conv1`, `layer1.*`, `*.downsample.0`), or `type:` and a pattern of
            class names of float layers (`type:Linear`, `type:Conv?d`), or a class (`nn.Linear`). "activation" is the
            grid of the layer's input. Later keys win, whatever their kind. A key that matches no layer is an error
            when the model is prepared. A different rule starts with its own default options; a granularity other than
            "group" drops the group_size.
        target: the runtime for which the grids are made: one of `qat.targets.PROFILES`, which docs/targets.md explains.
        first_bits, last_bits: bits of weight and input of the first and of the last quantized layer in the order of
            execution, 1 to 16; None treats it like the others. Overrides win over them.
        residual_bits: bits of the tensors that sums, products, concatenations, averages and float operations read, 1
            to 16. None: at least 8, since published low-bit networks have all these in float. If these are not
            activation's bits, the grid is the target's own, and a layer that reads such a tensor gets its own grid
            behind that one.

    An unknown target, field or override key, or a grid that the target does not run, is a ValueError.

    >>> first_and_last = {"activation": {"bits": 8}, "weight": {"bits": 8}}
    >>> recipe = QuantRecipe(weight={"bits": 4}, overrides={"conv1": first_and_last})
    >>> recipe.for_layer("conv1").weight.bits, recipe.for_layer("layer1.0.conv1").weight.bits
    (8, 4)
    >>> str(recipe.weight), recipe == QuantRecipe(weight=QuantSpec(bits=4), overrides={"conv1": first_and_last})
    ('int4 narrow symmetric per channel', True)
    >>> str(QuantRecipe(target="tensorrt").activation)
    'int8 symmetric per tensor'
    """

    weight: QuantSpec = UNSET
    activation: QuantSpec = UNSET
    overrides: Mapping[str, Fields] = field(default_factory=dict)
    target: str = "onnxruntime"
    first_bits: int | None = None
    last_bits: int | None = None
    residual_bits: int | None = None

    if TYPE_CHECKING:  # the fields are complete specs, the arguments need not be

        def __init__(
            self,
            weight: QuantSpec | Fields | None = None,
            activation: QuantSpec | Fields | None = None,
            overrides: Mapping[Any, Fields] = ...,
            target: str = ...,
            first_bits: int | None = None,
            last_bits: int | None = None,
            residual_bits: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        try:
            profile_of(self.target)
        except ValueError as error:
            raise ValueError(f"QuantRecipe: {error}") from None
        for tensor in ("weight", "activation"):
            grid = _resolved(tensor, getattr(self, tensor), getattr(self.profile, tensor))
            object.__setattr__(self, tensor, grid)
        object.__setattr__(self, "overrides", _with_text_keys(self.overrides))
        for pattern in self.overrides:
            _check_override(pattern, self.overrides[pattern])
        # Grids that the target refuses fail here, before any model is prepared.
        everywhere = LayerRecipe(self.weight, self.activation)
        self._check_target(everywhere, "QuantRecipe")
        for name in ("first_bits", "last_bits", "residual_bits"):
            bits = getattr(self, name)
            if bits is not None and (isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 16):
                raise ValueError(f"QuantRecipe: {name} must be a whole number from 1 to 16 or None, got {bits!r}")
            self._check_target(_with_bits(everywhere, bits), f"QuantRecipe: {name}")
        for pattern in self.overrides:
            self._check_target(self._apply(everywhere, pattern), f"QuantRecipe: overrides[{pattern!r}]")

    @property
    def profile(self) -> TargetProfile:
        """Profile of the target: its integer operations and their grids."""
        return profile_of(self.target)

    @property
    def residual(self) -> QuantSpec:
        """Grid of the tensors that sums, products, concatenations and averages read."""
        bits = max(self.activation.bits, RESIDUAL_BITS) if self.residual_bits is None else self.residual_bits
        return self.activation if bits == self.activation.bits else self.profile.activation.changed({"bits": bits})

    def for_layer(
        self, name: str, kind: "type[nn.Module] | None" = None, position: Position | None = None
    ) -> LayerRecipe:
        """Return the grids of a layer.

        They are the recipe's own, with first_bits or last_bits, and then every override that matches. `kind` is the
        class of the float layer, without its parametrizations; None ignores overrides by type. `position` is "first" or
        "last" in the order of execution.

        >>> from torch import nn
        >>> recipe = QuantRecipe(last_bits=6, overrides={nn.Linear: {"weight": {"init": "mse"}}})
        >>> layer = recipe.for_layer("fc", nn.Linear, "last")
        >>> layer.weight.bits, layer.activation.bits, layer.weight.init
        (6, 6, 'mse')
        """
        layer = LayerRecipe(self.weight, self.activation)
        if position is not None:
            layer = _with_bits(layer, self.first_bits if position == "first" else self.last_bits)
        for pattern in self.overrides:
            if self.matches(pattern, name, kind):
                layer = self._apply(layer, pattern)
        return layer

    @staticmethod
    def matches(pattern: str, name: str, kind: "type[nn.Module] | str | None" = None) -> bool:
        """Return True if a key of `overrides` matches a layer.

        A key that names a module matches all layers in it. `kind` is the class of the float layer, or its name; None
        matches no `type:` key.

        >>> QuantRecipe.matches("layer1", "layer1.0.conv1"), QuantRecipe.matches("type:Linear", "fc")
        (True, False)
        """
        if pattern.startswith(TYPE_PREFIX):
            class_name = kind.__name__ if isinstance(kind, type) else kind
            return class_name is not None and fnmatchcase(class_name, pattern.removeprefix(TYPE_PREFIX))
        steps = name.split(".")  # a pattern may match any module around the layer
        return any(fnmatchcase(".".join(steps[:depth]), pattern) for depth in range(1, len(steps) + 1))

    def _apply(self, layer: LayerRecipe, pattern: str) -> LayerRecipe:
        change = self.overrides[pattern]
        grids = {}
        for key in ("weight", "activation"):
            try:
                grids[key] = getattr(layer, key).changed(change.get(key, {}))
            except ValueError as error:
                raise ValueError(f"QuantRecipe: overrides[{pattern!r}][{key!r}]: {error}") from error
        return LayerRecipe(
            **grids,
            skipped_by=layer.skipped_by if "skip" not in change else pattern if change["skip"] else None,
        )

    def _check_target(self, layer: LayerRecipe, where: str) -> None:
        refusal = grid_refusal(self.profile, "activation", layer.activation)
        refusal = refusal or grid_refusal(self.profile, "weight", layer.weight)
        if refusal is not None:
            raise ValueError(f"{where}: {refusal}")


def grid_refusal(profile: TargetProfile, role: Role, spec: QuantSpec) -> str | None:
    """Return why a target does not run a grid, and what to use instead, or None."""
    if role == "weight" and not spec.symmetric:
        rule = " and rule='lsq'" if spec.rule == "lsq_plus" else ""
        return f"an affine weight has no exact BatchNorm folding; use symmetric=True{rule}"
    return profile.refusal(role, spec)


def _with_bits(layer: LayerRecipe, bits: int | None) -> LayerRecipe:
    if bits is None:
        return layer
    change = {"bits": bits}
    return replace(layer, weight=layer.weight.changed(change), activation=layer.activation.changed(change))


def _resolved(tensor: str, given: Any, default: QuantSpec) -> QuantSpec:
    if given is None:
        return default
    if not isinstance(given, (QuantSpec, Mapping)):
        raise TypeError(f"QuantRecipe: {tensor} must be a QuantSpec, a mapping of its fields or None, got {given!r}")
    if isinstance(given, Mapping):
        _check_fields(f"QuantRecipe: {tensor}", given)
    try:
        return (given if isinstance(given, QuantSpec) else QuantSpec(**given)).resolved(default)
    except ValueError as error:
        raise ValueError(f"QuantRecipe: {tensor}: {error}") from error


def _check_fields(where: str, given: Fields) -> None:
    problem = unknown_name(given, sorted(spec_field.name for spec_field in fields(QuantSpec)))
    if problem:
        raise ValueError(f"{where}: {problem}")


def pattern_of(key: object) -> str | None:
    """Return a key of `overrides` as text: "type:Linear" for nn.Linear.

    None is for what is neither text nor a class.

    >>> pattern_of(int), pattern_of("layer1.*"), pattern_of(4)
    ('type:int', 'layer1.*', None)
    """
    pattern = f"{TYPE_PREFIX}{key.__name__}" if isinstance(key, type) else key
    return pattern if isinstance(pattern, str) else None


def _with_text_keys(overrides: Mapping[Any, Fields]) -> dict[str, Fields]:
    if not isinstance(overrides, Mapping):
        raise TypeError(f"QuantRecipe: overrides must be a mapping, got {overrides!r}")
    found: dict[str, Fields] = {}
    for key, change in overrides.items():
        pattern = pattern_of(key)
        if pattern is None:
            raise TypeError(f"QuantRecipe: overrides: a key is a pattern of names or a class of layers, got {key!r}")
        if pattern == TYPE_PREFIX:
            raise ValueError(f"QuantRecipe: overrides[{pattern!r}]: the class is missing; write 'type:Linear'")
        if pattern in found:
            raise ValueError(f"QuantRecipe: overrides: a class and {pattern!r} say the same; keep one of them")
        found[pattern] = change
    return found


def _check_override(pattern: str, change: Fields) -> None:
    where = f"QuantRecipe: overrides[{pattern!r}]"
    if not isinstance(change, Mapping):
        raise ValueError(f"{where}: must be a mapping, got {change!r}")
    problem = unknown_name(change, ("weight", "activation", "skip"))
    if problem:
        raise ValueError(f"{where}: {problem}")
    check_types(Override, change, where)
    for key, value in change.items():
        if key != "skip":
            _check_fields(f"{where}[{key!r}]", value)


class ScopedRecipe:
    """Recipe for the graph at a path of the model."""

    first = last = ""  # names of its first and last layer, if known

    def __init__(self, recipe: QuantRecipe, prefix: str = "") -> None:
        self.recipe, self.prefix = recipe, prefix
        self.activation, self.residual, self.profile = recipe.activation, recipe.residual, recipe.profile

    def for_layer(self, name: str, kind: "type[nn.Module] | None" = None) -> LayerRecipe:
        """Return the grids of a layer of the graph."""
        position: Position | None = None
        if name and name in (self.first, self.last):
            alone = self.first == self.last  # the only layer is both: first_bits wins, if it is set
            position = "first" if name == self.first and not (alone and self.recipe.first_bits is None) else "last"
        return self.recipe.for_layer(self.full_name(name), kind, position)

    def full_name(self, name: str) -> str:
        """Return the name in the whole model of something in the graph."""
        return f"{self.prefix}.{name}" if self.prefix else name
