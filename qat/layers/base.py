"""`QuantLayer`, the base of quantized layers with one weight."""

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qat.collectives import whole
from qat.functional import round_ste
from qat.layers.folding import IntegerWeight, fold_weight
from qat.layers.twins import ActivationSpec, QuantTwin
from qat.quantizer import Quantizer, as_rows, create_quantizer, scale_shape
from qat.spec import QuantSpec, default_spec


class QuantLayer(QuantTwin):
    """Mixin for quantized twins with one weight; the other base is the float layer.

    Training computes with fake-quantized operands in float. Evaluation computes as the deployed integers do, if the
    input's quantizer is known: integer codes of input and weight, int32 bias, BatchNorm folded into the scale. So
    evaluation measures the accuracy of the exported model. Rules without an integer grid, scales per group of inputs,
    and layers with a quantizer that is switched off are evaluated as they are trained.

    Args:
        weight_spec: grid of the weight; what it leaves open: 8 bits, symmetric, narrow, per output channel.
        activation_spec: grid of the input; what it leaves open, and "default": 8 bits unsigned with a zero point;
            None: the input is quantized elsewhere. Before the first use call `qat.calibrate(layer, batches)`.

    The other arguments are those of torch's layer, in its order; these two go by name.
    """

    has_input_grid: ClassVar[bool] = True  # False where the input is indices

    @property
    def input_axis(self) -> int:
        """Axis of the input that the layer sums over, from the end: the channels."""
        return -1 - len(getattr(self, "kernel_size", ()))

    weight: Tensor
    bias: Any
    weight_quantizer: Quantizer
    input_quantizer: Quantizer | None

    def add_quantizers(self, weight_spec: QuantSpec | None, activation_spec: ActivationSpec) -> None:
        """Create the quantizers; constructors call it once the weight exists."""
        spec = resolved_weight_spec(weight_spec)
        shape = scale_shape(spec, tuple(self.channels_first(self.weight).shape))
        self.weight_quantizer = create_quantizer(spec, "weight", shape, self.weight.device)
        self.input_quantizer = quantizer_or_none(activation_spec, self.weight.device)
        if self.input_quantizer is not None:
            self.input_quantizer.summed_axis = self.input_axis
        if not self.weight.is_meta:  # else `from_float` calls again, with the real weight
            self.calibrate_weight()

    def calibrate_weight(self) -> None:
        """Set the range of the weight quantizer from the present weight."""
        self.fit_weight(self.weight)

    def fit_weight(self, weight: Tensor) -> None:
        """Set the weight's range from this weight, in torch's layout, unless frozen."""
        if self.weight_quantizer.is_frozen:
            return
        rows = self.channels_first(whole(weight.detach()))  # whole: not this rank's shard
        self.weight_quantizer.fit(as_rows(rows, self.weight_quantizer.spec), rows.numel())

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the operation: linear in x and in weight, with the bias added last."""
        raise TypeError(f"{type(self).__name__}: a quantized layer must implement operate(x, weight, bias)")

    def channels_first(self, weight: Tensor) -> Tensor:
        """Return the weight as quantizers see it: output channels first, then inputs."""
        return weight

    def torch_layout(self, weight: Tensor) -> Tensor:
        """Undo `channels_first`."""
        return weight

    def per_channel(self, values: Tensor, weight: Tensor) -> Tensor:
        """View (channels,) so that it broadcasts over this weight's output."""
        return values.reshape(-1, *[1] * (weight.dim() - 2))

    def forward(
        self,
        x: Tensor,
        input_quantizer: Quantizer | None = None,
        norm: nn.Module | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer, and the BatchNorm after it, which evaluation folds.

        `input_quantizer` is the one on whose grid x already lies; a layer that has its own applies any but that. `bias`
        replaces the layer's own.
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
        """Compute with this weight and bias, fake-quantized or on integers.

        `options` are further keyword arguments of the layer's `operate`.
        """
        if self.input_quantizer is not None and self.input_quantizer is not input_quantizer:
            input_quantizer, x = self.input_quantizer, self.input_quantizer(x)
        # A norm in training mode uses the batch's statistics and cannot be folded.
        floats = self.training or (norm is not None and norm.training)
        if floats or input_quantizer is None or not self._runs_on_integers(input_quantizer):
            y = self.operate(x, self.quantized(weight), bias, **options)
            return y if norm is None else norm(y)
        integers, step = self.integers(input_quantizer, norm, weight, bias), input_quantizer.grid()[0]
        return self.integer_forward(x, integers, step, **options)

    def quantized(self, weight: Tensor) -> Tensor:
        """Return the weight on its grid, in torch's layout."""
        return self.torch_layout(self.weight_quantizer(self.channels_first(weight)))

    def integers(
        self,
        input_quantizer: Quantizer,
        norm: nn.Module | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> IntegerWeight:
        """Return the layer's integers, which evaluation computes with and export writes.

        A given weight, with its bias or None, takes the place of the layer's own two; `norm` is folded in.
        """
        return self.folded(input_quantizer.grid()[0].float(), norm, weight, bias)

    def folded(
        self, input_scale: Tensor, norm: nn.Module | None, weight: Tensor | None, bias: Tensor | None
    ) -> IntegerWeight:
        """Return `integers` for an input on a grid of this step, shape ()."""
        if weight is None:
            weight, bias = self.weight, self.bias if bias is None else bias
        rows = self.channels_first(weight)
        scale, zero_point = self.weight_quantizer.grid(rows)
        codes = self.weight_quantizer.codes(rows) - zero_point
        return fold_weight(codes, scale, bias, input_scale, norm)

    def _runs_on_integers(self, input_quantizer: Quantizer) -> bool:
        return input_quantizer.has_integers and self.weight_quantizer.has_integers

    def integer_forward(self, x: Tensor, integers: IntegerWeight, step: Tensor, **options: Any) -> Tensor:
        """Compute (operate(x / step, codes) + bias_codes) * accumulator_scale.

        x lies on a grid of this step. The codes are integers in float32. Sums up to 2^24 are exact in any order. Larger
        sums have a relative error of 2^-24, far less than the level to which they are rounded next.
        """
        # sums of integers are exact without autocast, which the meta device does not have
        meta = x.device.type == "meta"
        with nullcontext() if meta else torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            x_codes = with_strides_of(x, round_ste(x.to(wide) / step))
            codes = self.torch_layout(integers.codes.to(wide))
            total = self.operate(x_codes, codes, None, **options) + self.per_channel(integers.bias_codes, codes)
            return (total * self.per_channel(integers.accumulator_scale, codes)).to(x.dtype)


def with_strides_of(x: Tensor, y: Tensor) -> Tensor:
    """Give y the strides of x on axes of length 1."""
    # torch chooses the memory format of a convolution's result by them.
    strides = [mine if size == 1 else other for size, mine, other in zip(x.shape, x.stride(), y.stride(), strict=True)]
    return y if list(y.stride()) == strides else y.as_strided(y.shape, strides)


def quantizer_or_none(activation_spec: ActivationSpec, device: torch.device | str | None) -> Quantizer | None:
    """Create the quantizer of an input; None without a spec."""
    spec = resolved_input_spec(activation_spec)
    return None if spec is None else create_quantizer(spec, "activation", (), device)


def resolved_weight_spec(weight_spec: QuantSpec | None) -> QuantSpec:
    """Complete a layer's `weight_spec` by the default grid of weights."""
    if not isinstance(weight_spec, QuantSpec | None):
        raise TypeError(f"weight_spec must be a QuantSpec or None, got {weight_spec!r}")
    return (weight_spec or QuantSpec()).resolved(default_spec("weight"))


def resolved_input_spec(activation_spec: ActivationSpec) -> QuantSpec | None:
    """Complete a layer's `activation_spec` by the default grid of activations."""
    if activation_spec is None:
        return None
    spec = QuantSpec() if activation_spec == "default" else activation_spec  # which leaves everything open
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"activation_spec must be a QuantSpec, None or 'default', got {activation_spec!r}")
    spec = spec.resolved(default_spec("activation"))
    if spec.granularity != "tensor":
        raise ValueError(f"activation_spec: granularity {spec.granularity!r} is for weights; use granularity='tensor'")
    return spec
