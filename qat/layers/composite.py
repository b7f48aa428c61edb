"""The base of twins that compute several products: attention and recurrent layers."""

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from qat.layers.base import default_input_spec
from qat.layers.sharing import QuantTwin
from qat.spec import QuantSpec

if TYPE_CHECKING:
    from typing_extensions import Self


class CompositeTwin(QuantTwin):
    """A twin that quantizes its inputs itself, in a prepared model too, since each of its products reads its own.

    The weights stay parameters of this layer, under torch's names. Each product is a module inside it.
    """

    @classmethod
    def from_float(
        cls,
        layer: nn.Module,
        weight_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | Literal["default"] | None = "default",
    ) -> "Self":
        """See `QuantTwin.from_float`; activation_spec is as in the constructor, None for weights only."""
        return super().from_float(layer, weight_spec, default_input_spec(activation_spec))

    def inner_weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The weight and bias with which forward calls each inner `QuantFunction`, by its name."""
        raise TypeError(f"{type(self).__name__}: a composite twin must implement inner_weights()")
