"""Quantized twins of float layers, on shared parameters, and their registry."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qat.contexts import evaluating
from qat.recipe import LayerRecipe
from qat.spec import QuantSpec
from qat.torch_internals import AnyConvolution, buffers_of, parameters_of

if TYPE_CHECKING:
    from typing_extensions import Self

# The grid of a layer's input: "default" leaves all of it open, None quantizes the input elsewhere.
ActivationSpec = QuantSpec | Literal["default"] | None


def share_parameters(source: nn.Module, target: nn.Module) -> None:
    """Share the source's parameters and buffers, parametrizations included."""
    parametrized: Any = source.parametrizations if parametrize.is_parametrized(source) else {}
    for name, originals in parametrized.items():
        with evaluating(source):  # so that reading and registering (spectral norm) changes no state
            setattr(target, name, nn.Parameter(getattr(source, name).detach().clone()))
            for step in originals:
                parametrize.register_parametrization(target, name, step, unsafe=True)
        transferred: Any = target.parametrizations
        for key, parameter in originals.named_parameters(recurse=False):
            setattr(transferred[name], key, parameter)
    for owned in (parameters_of, buffers_of):
        mine: dict[str, Any] = owned(target)
        theirs = owned(source)
        mine.update({name: theirs[name] for name in mine if name in theirs})


class QuantTwin(nn.Module):
    """Base of quantized twins: `QuantLayer` of one weight, `CompositeTwin` of more."""

    float_type: ClassVar[type[nn.Module]]  # the layer that this one replaces; `register_twin` sets it
    argument_names: ClassVar[tuple[str, ...]] = ()  # of the constructor, kept as attributes, besides bias and dtype

    def __new__(cls, *args: Any, **given: Any) -> "Self":
        """Refuse a grid in an argument of torch's layer, which would misread it."""
        others = [*args, *(value for name, value in given.items() if not name.endswith("_spec"))]
        grid = next((value for value in others if isinstance(value, QuantSpec)), None)
        # Constructors of a user's own, and `QuantFunction`'s, may take a grid where they like.
        as_torchs = cls.__init__.__module__.startswith("qat.") and isinstance(cls.float_type, type)
        if grid is not None and as_torchs:
            raise TypeError(f"{cls.__name__}: got {grid!r} without its name; write weight_spec= or activation_spec=")
        return super().__new__(cls)

    @classmethod
    def from_float(
        cls,
        layer: nn.Module,
        weight_spec: QuantSpec | None = None,
        activation_spec: ActivationSpec = "default",
    ) -> "Self":
        """Return the quantized twin of a float layer, which shares its parameters.

        It may be parametrized (`torch.nn.utils.parametrize`, weight norm); another type of layer is a TypeError.

        >>> from qat import QuantLinear
        >>> twin = QuantLinear.from_float(nn.Linear(8, 2), QuantSpec(bits=4))
        >>> print(twin.weight_quantizer.describe(), "x", twin.input_quantizer.describe())
        int4 narrow symmetric per channel x uint8 affine per tensor
        """
        cls.check_float(layer)
        make: Any = cls
        with torch.device("meta"):  # no memory, and no initialisation that draws random numbers
            twin: Self = make(**cls.constructor_arguments(layer), weight_spec=weight_spec, activation_spec=None)
        cls.share(layer, twin)
        with evaluating(twin):  # so that reading a parametrized weight (spectral norm) changes no state
            twin.add_quantizers(weight_spec, activation_spec)
        return twin.train(layer.training)

    def to_float(self) -> nn.Module:
        """Return the float layer again, on the same parameters."""
        return self.plain_layer(self)

    @classmethod
    def plain_layer(cls, source: nn.Module) -> nn.Module:
        """Return a `float_type` on the parameters of a twin, or of a similar float layer."""
        with torch.device("meta"):
            layer = cls.float_type(**cls.constructor_arguments(source))
        cls.share(source, layer)
        return layer.train(source.training)

    @classmethod
    def check_float(cls, layer: nn.Module) -> None:
        """Raise TypeError if `from_float` cannot take this layer."""
        if parametrize.type_before_parametrizations(layer) is not cls.float_type:
            raise TypeError(
                f"{cls.__name__}.from_float: expected {cls.float_type.__name__}, got {type(layer).__name__}"
            )

    @staticmethod
    def share(source: Any, target: Any) -> None:
        """Share the source's parameters; one is the float layer, the other its twin."""
        share_parameters(source, target)

    @classmethod
    def constructor_arguments(cls, layer: Any) -> dict[str, Any]:
        """Return the constructor arguments of a float layer like this one."""
        if not cls.argument_names:
            raise TypeError(f"{type(layer).__name__} has no quantized twin")
        found = {name: getattr(layer, name) for name in cls.argument_names} | {"dtype": layer.weight.dtype}
        return found | {"bias": layer.bias is not None} if hasattr(layer, "bias") else found

    def add_quantizers(self, weight_spec: QuantSpec | None, activation_spec: ActivationSpec) -> None:
        """Create the quantizers; constructors call it once the weights exist."""
        raise TypeError(f"{type(self).__name__}: a quantized twin must implement add_quantizers(...)")


class CompositeTwin(QuantTwin):
    """Base of twins whose products quantize their inputs, in a prepared model too.

    The weights stay parameters of this layer, under torch's names. Each product is a module inside it.
    """

    def inner_weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return the weight and bias of each inner `QuantFunction`, by its name."""
        raise TypeError(f"{type(self).__name__}: a composite twin must implement inner_weights()")


_TWINS: dict[type[nn.Module], type[QuantTwin]] = {}

TwinClass = TypeVar("TwinClass", bound=type[QuantTwin])


def register_twin(float_class: type[nn.Module]) -> Callable[[TwinClass], TwinClass]:
    """Register a quantized layer as the twin of a float layer, for `prepare`.

    The twin is a `QuantLayer` and usually a subclass of the float layer. It sets `argument_names`, or overrides
    `constructor_arguments`, and implements `operate`, which must be linear in the input and in the weight and must add
    the bias last, unscaled: evaluation and export call it with integers. A layer that scales its bias overrides
    `compute`, and `integers` for its own bias (`weight is None`): `compute` hands it the scaled one. The float layer
    has the attributes `weight` and `bias` (None for none).

    What is not a class of modules, or a twin that is neither `QuantLayer` nor `CompositeTwin`, is a TypeError; a
    float_class that has another twin already is a ValueError.

    >>> from qat.layers import QuantLinear
    >>> class Projection(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x.flatten(1))
    >>> @register_twin(Projection)
    ... class QuantProjection(QuantLinear):
    ...     def operate(self, x, weight, bias):
    ...         return super().operate(x.flatten(1), weight, bias)
    >>> float_type_of(Projection(8, 2)).__name__
    'Projection'
    """
    if not (isinstance(float_class, type) and issubclass(float_class, nn.Module)) or issubclass(float_class, QuantTwin):
        raise TypeError(f"register_twin: expected a class of float layers, @register_twin(Float), got {float_class!r}")

    def register(cls: TwinClass) -> TwinClass:
        if not (isinstance(cls, type) and issubclass(cls, QuantTwin)):
            raise TypeError(f"register_twin({float_class.__name__}): expected a subclass of QuantLayer, got {cls!r}")
        known = _TWINS.get(float_class, cls)  # the same by name: a notebook's cell that ran again
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"register_twin({float_class.__name__}): its twin is {known.__module__}.{known.__name__}")
        _TWINS[float_class] = cls
        cls.float_type = float_class
        return cls

    return register


def float_type_of(layer: nn.Module) -> type[nn.Module] | None:
    """Return the registered class of a layer or twin; None if it has no twin."""
    if isinstance(layer, QuantTwin):
        return layer.float_type
    own = parametrize.type_before_parametrizations(layer)
    for base in own.__mro__:
        if base in _TWINS:
            # A subclass with a forward of its own computes something else.
            same = all(getattr(own, name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))
            return base if same else None
    return None


def is_composite(layer: nn.Module) -> bool:
    """Return True if a float layer's twin is a `CompositeTwin`."""
    float_type = float_type_of(layer)
    return float_type is not None and issubclass(_TWINS[float_type], CompositeTwin)


def type_name(layer: nn.Module) -> str:
    """Return the name of the class by which a recipe speaks of a layer."""
    return (float_type_of(layer) or parametrize.type_before_parametrizations(layer)).__name__


def is_layer(module: nn.Module) -> bool:
    """Return True if a recipe can speak of a module, with a twin or without.

    Its work is a matrix product or a table look-up. Subclasses that compute something else have no twin, nor do direct
    subclasses of torch's abstract layers.
    """
    return isinstance(module, (*_TWINS, AnyConvolution, nn.RNNBase, nn.Bilinear, nn.EmbeddingBag))


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return name and module of every layer for which `is_layer` holds."""
    return ((name, module) for name, module in model.named_modules() if is_layer(module))


def make_twin(name: str, layer: nn.Module, chosen: LayerRecipe) -> QuantTwin:
    """Return a layer's quantized twin, or itself if it is one."""
    if isinstance(layer, QuantTwin):
        return layer
    float_type = float_type_of(layer)
    assert float_type is not None, f"{name} has no twin"
    twin = _TWINS[float_type]
    if parametrize.type_before_parametrizations(layer) is not float_type:
        layer = twin.plain_layer(layer)
    # Its input is quantized elsewhere, except in a composite.
    if issubclass(twin, CompositeTwin):
        where, activation = name, chosen.activation
    else:
        where, activation = f"{name} (weight)", None
    try:
        return twin.from_float(layer, chosen.weight, activation)
    except (TypeError, ValueError) as error:  # a group size that does not divide, NaN in the weight
        raise ValueError(f"prepare: {where}: {error}") from error
