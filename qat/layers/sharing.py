"""A quantized twin and its float layer: each is made from the other, on the same parameters."""

import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from qat.evaluating import evaluating
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


class QuantTwin(nn.Module):
    """Base of the quantized twins; `QuantLayer` is one weight, `CompositeTwin` is several."""

    float_type: ClassVar[type[nn.Module]]
    """The float layer that this one replaces; `register_twin` sets it."""

    argument_names: ClassVar[tuple[str, ...]] = ()
    """Arguments of its constructor that it keeps as attributes, besides `bias` and `dtype`."""

    def __new__(cls, *_: Any, **given: Any) -> "Self":
        """Say where a width belongs: one number for the layer would leave open whether its input has it too."""
        if "bits" in given and "bits" not in inspect.signature(cls.__init__).parameters:
            bits = given["bits"]
            raise TypeError(
                f"{cls.__name__}: a layer has a grid for its weight and one for its input; write"
                f" weight_spec=QuantSpec(bits={bits!r}), activation_spec=QuantSpec(bits={bits!r}), or one of them"
            )
        return super().__new__(cls)

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
