"""What every quantized layer shares: its quantizers, and the two ways of computing."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qat.functional import round_ste
from qat.layers.folding import IntegerWeight, fold_weight
from qat.quantizer import Quantizer, as_rows, create_quantizer, scale_shape
from qat.spec import QuantSpec, default_activation_spec, default_weight_spec


class QuantLayer(nn.Module):
    """Mixin of the quantized twins; the other base is torch's own layer.

    Training computes with fake-quantized operands in float. Evaluation, once the input's grid is known, computes as
    the deployed integers do: integer codes of input and weight, int32 bias, BatchNorm folded into the scale. So the
    accuracy measured in evaluation is that of the exported model. Rules without an integer grid, and scales per group
    of inputs, are evaluated as they are trained.
    """

    float_type: ClassVar[type[nn.Module]]
    """The layer of torch that this one replaces."""

    weight: Tensor
    bias: Any
    weight_quantizer: Quantizer
    input_quantizer: Quantizer | None

    def add_quantizers(self, weight_spec: QuantSpec | None, activation_spec: QuantSpec | None) -> None:
        """Create the quantizers; called by constructors once the weight exists."""
        spec = weight_spec or default_weight_spec()
        shape = scale_shape(spec, tuple(self.weight.shape))
        self.weight_quantizer = create_quantizer(spec, "weight", shape, self.weight.device)
        self.input_quantizer = None
        if activation_spec is not None:
            self.input_quantizer = create_quantizer(activation_spec, "activation", (), self.weight.device)
        if not self.weight.is_meta:
            self.calibrate_weight()

    def calibrate_weight(self) -> None:
        """Set the weight's range from the weight as it is now."""
        weight = self.weight.detach()
        self.weight_quantizer.fit(as_rows(weight, self.weight_quantizer.spec), weight.numel())

    @classmethod
    def from_float(
        cls, layer: nn.Module, weight_spec: QuantSpec | None = None, activation_spec: QuantSpec | None = None
    ) -> "QuantLayer":
        """The quantized twin of a float layer; it takes over the layer's parameters, it does not copy them.

        Args:
            layer: the float layer.
            weight_spec: grid of the weight; default 8 bits per channel.
            activation_spec: grid of the input, or None if something outside quantizes it, as in a prepared model.

        Raises:
            TypeError: if the layer is of another type.
        """
        if type(layer) is not cls.float_type:
            raise TypeError(
                f"{cls.__name__}.from_float: expected {cls.float_type.__name__}, got {type(layer).__name__}"
            )
        arguments = cls.constructor_arguments(layer)
        twin = cls(**arguments, device="meta", weight_spec=weight_spec, activation_spec=None)
        twin.weight, twin.bias = layer.weight, layer.bias  # type: ignore[assignment]
        twin.add_quantizers(weight_spec, activation_spec)
        return twin.train(layer.training)

    @staticmethod
    def constructor_arguments(layer: Any) -> dict[str, Any]:
        """Constructor arguments of the float layer that make one like it."""
        raise TypeError(f"{type(layer).__name__} has no quantized twin")

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's linear operation with these operands."""
        raise TypeError(f"{type(self).__name__}: a quantized layer must implement operate(x, weight, bias)")

    def per_channel(self, values: Tensor) -> Tensor:
        """View (channels,) so that it broadcasts over the layer's output."""
        return values.reshape(-1, *[1] * (self.weight.dim() - 2))

    def forward(self, x: Tensor, grid: Quantizer | None = None, norm: nn.Module | None = None) -> Tensor:
        """Apply the layer, and the BatchNorm behind it.

        Args:
            x: the input, in the shapes of torch's layer.
            grid: the quantizer on whose grid x lies already; a layer with an input_quantizer of its own needs none.
            norm: the BatchNorm that follows; in evaluation it is folded into the integers.
        """
        if self.input_quantizer is not None:
            grid = self.input_quantizer
            x = grid(x)
        if self.training or grid is None or grid.observer is not None or not self._runs_on_integers(grid):
            y = self.operate(x, self.weight_quantizer(self.weight), self.bias)
            return y if norm is None else norm(y)
        return self._integer_forward(x, grid, norm)

    def integers(self, grid: Quantizer, norm: nn.Module | None = None) -> IntegerWeight:
        """The integers that stand for this layer on an input of this grid: what evaluation uses and export writes."""
        scale, zero_point = self.weight_quantizer.grid(self.weight)
        codes = self.weight_quantizer.codes(self.weight) - zero_point
        return fold_weight(codes, scale, self.bias, grid.grid()[0].float(), norm)

    def _runs_on_integers(self, grid: Quantizer) -> bool:
        return grid.has_integers and self.weight_quantizer.has_integers

    def _integer_forward(self, x: Tensor, grid: Quantizer, norm: nn.Module | None) -> Tensor:
        """y = (operate(x_codes - zero_point, codes) + bias_codes) * accumulator_scale.

        The codes are integers in float32: sums up to 2^24 are exact whatever the order, beyond that they are right to
        2^-24 of their size, far less than the level that they are rounded to next.
        """
        integers = self.integers(grid, norm)
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            x_codes = round_ste(x.to(wide) / grid.grid()[0])
            total = self.operate(x_codes, integers.codes.to(wide), None) + self.per_channel(integers.bias_codes)
            return (total * self.per_channel(integers.accumulator_scale)).to(x.dtype)


def default_input_spec(activation_spec: QuantSpec | str | None) -> QuantSpec | None:
    """Resolve a layer's `activation_spec`: "default" is 8 bits unsigned with a zero point, None is no quantizer.

    Raises:
        TypeError: for anything else.
        ValueError: for a granularity other than "tensor".
    """
    if activation_spec == "default":
        return default_activation_spec()
    if isinstance(activation_spec, QuantSpec) and activation_spec.granularity != "tensor":
        raise ValueError(
            f"activation_spec: granularity {activation_spec.granularity!r} is for weights; use granularity='tensor'"
        )
    if activation_spec is None or isinstance(activation_spec, QuantSpec):
        return activation_spec
    raise TypeError(f"activation_spec must be a QuantSpec, None or 'default', got {activation_spec!r}")
