"""The one registry of twins: classes of float layers to their quantized twins."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from qat.layers.composite import CompositeTwin
from qat.layers.sharing import QuantTwin
from qat.recipe import LayerRecipe
from qat.torch_internals import AnyConvolution

_TWINS: dict[type[nn.Module], type[QuantTwin]] = {}

TwinClass = TypeVar("TwinClass", bound=type[QuantTwin])


def register_twin(float_class: type[nn.Module]) -> Callable[[TwinClass], TwinClass]:
    """Class decorator: make a quantized layer the twin that `prepare` puts in place of a float layer.

    The twin is a `QuantLayer` and usually a subclass of the float layer. It implements `constructor_arguments` and
    `operate`, which must be linear in the input and in the weight and must add the bias last, unscaled: evaluation and
    export call it with integers. A layer that scales its bias overrides `compute`, and `integers` for its own bias
    (`weight is None`): `compute` hands it the scaled one. The float layer has the attributes `weight` and
    `bias` (None for none).

    Args:
        float_class: the class of the float layers.

    Raises:
        TypeError: if float_class is no module class, or the twin is neither `QuantLayer` nor `CompositeTwin`.
        ValueError: if float_class has another twin already.

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

    def register(cls: TwinClass) -> TwinClass:
        if not (isinstance(float_class, type) and issubclass(float_class, nn.Module)):
            raise TypeError(f"register_twin: expected a class of layers, got {float_class!r}")
        if not (isinstance(cls, type) and issubclass(cls, QuantTwin)):
            raise TypeError(f"register_twin({float_class.__name__}): expected a subclass of QuantLayer, got {cls!r}")
        known = _TWINS.get(float_class, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"register_twin({float_class.__name__}): its twin is {known.__module__}.{known.__name__}")
        _TWINS[float_class] = cls
        cls.float_type = float_class
        return cls

    return register


def float_type_of(layer: nn.Module) -> type[nn.Module] | None:
    """The registered class whose computation a layer, or its twin, does; None if it has no twin.

    A subclass counts if it only constructs differently, as torchvision's Conv3DSimple.

    >>> class Pointwise(nn.Conv2d):
    ...     def __init__(self, channels):
    ...         super().__init__(channels, channels, 1)
    >>> float_type_of(Pointwise(4)).__name__
    'Conv2d'
    """
    if isinstance(layer, QuantTwin):
        return layer.float_type
    own = parametrize.type_before_parametrizations(layer)
    for base in own.__mro__:
        if base in _TWINS:
            same = all(getattr(own, name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))
            return base if same else None
    return None


def is_composite(layer: nn.Module) -> bool:
    """Whether a float layer's twin is a `CompositeTwin`."""
    float_type = float_type_of(layer)
    return float_type is not None and issubclass(_TWINS[float_type], CompositeTwin)


def type_name(layer: nn.Module) -> str:
    """The name of the class by which a recipe speaks of a layer."""
    return (float_type_of(layer) or parametrize.type_before_parametrizations(layer)).__name__


def is_layer(module: nn.Module) -> bool:
    """Whether a recipe can speak of a module: its work is a matrix product or a table look-up, with a twin or without.

    Subclasses that compute something else have no twin, nor do direct subclasses of torch's abstract layers.
    """
    return isinstance(module, (*_TWINS, AnyConvolution, nn.RNNBase))


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every layer of a model for which `is_layer` holds."""
    return ((name, module) for name, module in model.named_modules() if is_layer(module))


def make_twin(name: str, layer: nn.Module, chosen: LayerRecipe) -> QuantTwin:
    """The quantized twin of a layer. Its input is quantized elsewhere; a composite quantizes its own inputs.

    A layer that is a twin already stays, with its quantizers.

    Raises:
        ValueError: if the grid does not fit the weight.
    """
    if isinstance(layer, QuantTwin):
        return layer
    float_type = float_type_of(layer)
    assert float_type is not None, f"{name} has no twin"
    twin = _TWINS[float_type]
    if parametrize.type_before_parametrizations(layer) is not float_type:
        layer = twin.plain_layer(layer)
    if issubclass(twin, CompositeTwin):
        where, activation = name, chosen.activation
    else:
        where, activation = f"{name} (weight)", None
    try:
        return twin.from_float(layer, chosen.weight, activation)
    except (TypeError, ValueError) as error:  # a group size that does not divide, NaN in the weight
        raise ValueError(f"prepare: {where}: {error}") from error
