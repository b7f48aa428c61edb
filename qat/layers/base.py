"""What every quantized layer shares: its quantizers, and the two ways of computing."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qat.functional import round_ste
from qat.layers.folding import IntegerWeight, fold_weight
from qat.layers.sharing import QuantTwin
from qat.quantizer import Quantizer, as_rows, create_quantizer, scale_shape
from qat.spec import QuantSpec, default_activation_spec, default_weight_spec


class QuantLayer(QuantTwin):
    """Mixin of the quantized twins; the other base is torch's own layer.

    Training computes with fake-quantized operands in float. Evaluation computes as the deployed integers do, once the
    input's grid is known: integer codes of input and weight, int32 bias, BatchNorm folded into the scale. So the
    accuracy that evaluation measures is that of the exported model. Rules without an integer grid, and scales per group
    of inputs, are evaluated as they are trained.
    """

    quantizer_arguments: ClassVar[tuple[str, ...]] = ("input_quantizer",)
    """Names of forward's keyword arguments that take the quantizer of each input tensor, in the order of the inputs."""

    weight: Tensor
    bias: Any
    weight_quantizer: Quantizer
    input_quantizer: Quantizer | None

    def add_quantizers(self, weight_spec: QuantSpec | None, activation_spec: QuantSpec | None) -> None:
        """Create the quantizers; called by constructors once the weight exists."""
        spec = weight_spec or default_weight_spec()
        shape = scale_shape(spec, tuple(self.channels_first(self.weight).shape))
        self.weight_quantizer = create_quantizer(spec, "weight", shape, self.weight.device)
        self.input_quantizer = None
        if activation_spec is not None:
            self.input_quantizer = create_quantizer(activation_spec, "activation", (), self.weight.device)
        if not self.weight.is_meta:
            self.calibrate_weight()

    def calibrate_weight(self) -> None:
        """Set the weight's range from the weight as it is now."""
        self.fit_weight(self.weight)

    def fit_weight(self, weight: Tensor) -> None:
        """Set the weight's range from this weight, given in torch's layout."""
        rows = self.channels_first(weight.detach())
        self.weight_quantizer.fit(as_rows(rows, self.weight_quantizer.spec), rows.numel())

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's linear operation with these operands."""
        raise TypeError(f"{type(self).__name__}: a quantized layer must implement operate(x, weight, bias)")

    def channels_first(self, weight: Tensor) -> Tensor:
        """The weight with its output channels on axis 0 and its inputs on axis 1, as quantizers see it."""
        return weight

    def torch_layout(self, weight: Tensor) -> Tensor:
        """The inverse of `channels_first`."""
        return weight

    def per_channel(self, values: Tensor, weight: Tensor) -> Tensor:
        """View (channels,) so that it broadcasts over the output that this weight makes."""
        return values.reshape(-1, *[1] * (weight.dim() - 2))

    def forward(
        self,
        x: Tensor,
        input_quantizer: Quantizer | None = None,
        norm: nn.Module | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer, and the BatchNorm behind it.

        Args:
            x: the input, in the shapes of torch's layer.
            input_quantizer: the quantizer on whose grid x lies already; a layer that has one of its own needs none.
            norm: the BatchNorm that follows; in evaluation it is folded into the integers.
            bias: one to use instead of the layer's own.
        """
        return self.compute(x, self.weight, self.bias if bias is None else bias, input_quantizer, norm)

    def compute(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_quantizer: Quantizer | None,
        norm: nn.Module | None,
        **options: Any,
    ) -> Tensor:
        """The layer with this weight and bias: fake-quantized in training, on integers in evaluation.

        `options` are keyword arguments that the layer's `operate` takes besides.
        """
        if self.input_quantizer is not None:
            input_quantizer = self.input_quantizer
            x = input_quantizer(x)
        # A norm that estimates its statistics anew cannot be folded yet.
        floats = self.training or (norm is not None and norm.training)
        if floats or input_quantizer is None or not self._runs_on_integers(input_quantizer):
            y = self.operate(x, self.quantized(weight), bias, **options)
            return y if norm is None else norm(y)
        return self._integer_forward(x, self.integers(input_quantizer, norm, weight, bias), input_quantizer, **options)

    def quantized(self, weight: Tensor) -> Tensor:
        """The weight on its grid, in torch's layout."""
        return self.torch_layout(self.weight_quantizer(self.channels_first(weight)))

    def integers(
        self,
        input_quantizer: Quantizer,
        norm: nn.Module | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> IntegerWeight:
        """The integers that stand for this layer on an input of this grid: what evaluation uses and export writes.

        Args:
            input_quantizer: the input's quantizer.
            norm: the BatchNorm to fold in.
            weight: None for the layer's own weight and bias; else bias may be None for none.
            bias: with `weight`, the bias that belongs to it.
        """
        if weight is None:
            weight, bias = self.weight, self.bias if bias is None else bias
        rows = self.channels_first(weight)
        scale, zero_point = self.weight_quantizer.grid(rows)
        codes = self.weight_quantizer.codes(rows) - zero_point
        return fold_weight(codes, scale, bias, input_quantizer.grid()[0].float(), norm)

    def _runs_on_integers(self, input_quantizer: Quantizer) -> bool:
        observes = input_quantizer.observer is not None
        return not observes and input_quantizer.has_integers and self.weight_quantizer.has_integers

    def _integer_forward(
        self, x: Tensor, integers: IntegerWeight, input_quantizer: Quantizer, **options: Any
    ) -> Tensor:
        """y = (operate(x_codes - zero_point, codes) + bias_codes) * accumulator_scale.

        The codes are integers in float32: sums up to 2^24 are exact whatever the order, beyond that they are right to
        2^-24 of their size, far less than the level that they are rounded to next.
        """
        with exact_arithmetic(x.device):
            wide = torch.promote_types(x.dtype, torch.float32)
            x_codes = with_strides_of(x, round_ste(x.to(wide) / input_quantizer.grid()[0]))
            codes = self.torch_layout(integers.codes.to(wide))
            total = self.operate(x_codes, codes, None, **options) + self.per_channel(integers.bias_codes, codes)
            return (total * self.per_channel(integers.accumulator_scale, codes)).to(x.dtype)


def with_strides_of(x: Tensor, y: Tensor) -> Tensor:
    """y with x's strides on axes of length 1: torch chooses the memory format of a convolution's result by them."""
    strides = [mine if size == 1 else other for size, mine, other in zip(x.shape, x.stride(), y.stride(), strict=True)]
    return y if list(y.stride()) == strides else y.as_strided(y.shape, strides)


def exact_arithmetic(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast, for sums of integers; the meta device knows no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


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
