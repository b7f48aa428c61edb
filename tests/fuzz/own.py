"""A float layer of one's own, and a twin that computes something else than the layers that it derives from."""

from torch import Tensor, nn

import qat


class OwnConv2d(nn.Conv2d):
    """A convolution of the channels in reverse order."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x.flip(1), weight, bias)


@qat.layers.register_twin(OwnConv2d)
class QuantOwnConv2d(qat.QuantConv2d):
    """The same on integer grids."""

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of the channels in reverse order."""
        return super().operate(x.flip(1), weight, bias)
