"""The base of twins that compute several products: attention and recurrent layers."""

from torch import Tensor

from qat.layers.sharing import QuantTwin


class CompositeTwin(QuantTwin):
    """A twin that quantizes its inputs itself, in a prepared model too, since each of its products reads its own.

    The weights stay parameters of this layer, under torch's names. Each product is a module inside it.
    """

    def inner_weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The weight and bias with which forward calls each inner `QuantFunction`, by its name."""
        raise TypeError(f"{type(self).__name__}: a composite twin must implement inner_weights()")
