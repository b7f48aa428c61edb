"""A quantized twin and its float layer: each is made from the other, on the same parameters."""

import functools
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from qat.evaluating import evaluating
from qat.expected import NamedArguments
from qat.spec import QuantSpec
from qat.torch_internals import buffers_of, parameters_of

if TYPE_CHECKING:
    from typing_extensions import Self

ActivationSpec = QuantSpec | Literal["default"] | None
"""The grid of a layer's input: "default" leaves all of it open, None quantizes the input elsewhere."""


def share_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give the target the source's own parameters and buffers, not copies, parametrizations included."""
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


def _check_arguments(twin: "type[QuantTwin]", args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Refuse a grid, or a width, in an argument of torch's, and a yes or no that is neither: torch takes both.

    One width for the whole layer would leave open whether its input has it too.

    Raises:
        TypeError: for the first such argument.
    """
    own = inspect.signature(twin.__init__).parameters
    by_position = [each.name for each in own.values() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    by_position += [f"argument {number}" for number in range(len(by_position) + 1, len(args) + 1)]
    float_type = getattr(twin, "float_type", None)  # a product of functions has none
    of_torch = _arguments_of(float_type) if isinstance(float_type, type) else {}
    for name, value in (*zip(by_position, args, strict=False), *given.items()):
        if name in own and name not in of_torch:
            continue
        if isinstance(value, QuantSpec) or name == "bits":
            spec = value if isinstance(value, QuantSpec) else f"QuantSpec(bits={value!r})"
            looks_up = "activation_spec" in own and own["activation_spec"].default is None
            raise TypeError(
                f"{twin.__name__}: got {name}={value!r}, but a grid goes by name; write weight_spec={spec}"
                + ("" if looks_up else f" for the weight, activation_spec={spec} for the input, or both")
            )
        yes_or_no = name in of_torch and isinstance(of_torch[name].default, bool)
        if yes_or_no and not isinstance(value, (int, type(None))):
            raise TypeError(f"{twin.__name__}: {name} must be True or False, got {value!r}")


@functools.cache
def _arguments_of(layer: type[nn.Module]) -> dict[str, inspect.Parameter]:
    """The arguments of a class's constructor and of those of its bases: LSTM's own takes `*args`."""
    makers = [vars(base)["__init__"] for base in reversed(layer.__mro__) if "__init__" in vars(base)]
    return {name: each for make in makers for name, each in inspect.signature(make).parameters.items()}


class QuantTwin(NamedArguments, nn.Module):
    """Base of the quantized twins; `QuantLayer` is one weight, `CompositeTwin` is several."""

    float_type: ClassVar[type[nn.Module]]
    """The float layer that this one replaces; `register_twin` sets it."""

    argument_names: ClassVar[tuple[str, ...]] = ()
    """Arguments of its constructor that it keeps as attributes, besides `bias` and `dtype`."""

    def __new__(cls, *args: Any, **given: Any) -> "Self":
        """Refuse what torch's constructors would take for something else; see `_check_arguments`."""
        _check_arguments(cls, args, given)
        return super().__new__(cls, *args, **given)

    @classmethod
    def from_float(
        cls,
        layer: nn.Module,
        weight_spec: QuantSpec | None = None,
        activation_spec: ActivationSpec = "default",
    ) -> "Self":
        """The quantized twin of a float layer. It shares the layer's parameters; it does not copy them.

        Args:
            layer: the float layer; it may be parametrized (`torch.nn.utils.parametrize`, weight norm).
            weight_spec, activation_spec: as in the constructor.

        Raises:
            TypeError: if the layer is of another type.

        >>> from qat import QuantLinear
        >>> twin = QuantLinear.from_float(nn.Linear(8, 2), QuantSpec(bits=4))
        >>> print(twin.weight_quantizer.describe(), "x", twin.input_quantizer.describe())
        int4 narrow symmetric per channel x uint8 affine per tensor
        """
        cls.check_float(layer)
        make: Any = cls
        with torch.device("meta"):
            twin: Self = make(**cls.constructor_arguments(layer), weight_spec=weight_spec, activation_spec=None)
        cls.share(layer, twin)
        with evaluating(twin):  # so that reading a parametrized weight (spectral norm) changes no state
            twin.add_quantizers(weight_spec, activation_spec)
        return twin.train(layer.training)

    def to_float(self) -> nn.Module:
        """The float layer again: the same parameters, without the quantizers."""
        return self.plain_layer(self)

    @classmethod
    def plain_layer(cls, source: nn.Module) -> nn.Module:
        """A `float_type` on the parameters of a twin, or of a float layer that only its constructor tells apart."""
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
        """Give the target the source's parameters; one of them is the float layer, the other its twin."""
        share_parameters(source, target)

    @classmethod
    def constructor_arguments(cls, layer: Any) -> dict[str, Any]:
        """Constructor arguments of the float layer that make one like it."""
        if not cls.argument_names:
            raise TypeError(f"{type(layer).__name__} has no quantized twin")
        found = {name: getattr(layer, name) for name in cls.argument_names} | {"dtype": layer.weight.dtype}
        return found | {"bias": layer.bias is not None} if hasattr(layer, "bias") else found

    def add_quantizers(self, weight_spec: QuantSpec | None, activation_spec: ActivationSpec) -> None:
        """Create the quantizers; constructors call it once the weights exist."""
        raise TypeError(f"{type(self).__name__}: a quantized twin must implement add_quantizers(...)")
