"""QuantMultiheadAttention: projections and products on integer grids."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from qat.layers.attention_core import OPERANDS, PROBABILITIES, PROJECTIONS, multihead_attention, projections
from qat.layers.base import quantizer_or_none, resolved_input_spec
from qat.layers.function import QuantFunction
from qat.layers.linear import QuantLinear
from qat.layers.twins import ActivationSpec, CompositeTwin, register_twin, share_parameters
from qat.quantizer import create_quantizer
from qat.spec import QuantSpec


def operand_spec(spec: QuantSpec) -> QuantSpec:
    """Return the grid of q, k and v for inputs on this grid.

    It is the same if it has a zero point, else a signed one. The rule stays, unless it has no such grid (pact, dorefa):
    then it becomes "lsq". Of one bit only "binary" has one.
    """
    if not spec.symmetric:
        return _first_possible("q, k and v", spec, spec.changed({"rule": "lsq"}))
    signed = replace(spec, signed=True, symmetric=True)
    return _first_possible("q, k and v", signed, signed.changed({"rule": "lsq"}))


def probability_spec(spec: QuantSpec) -> QuantSpec:
    """Return the grid of probabilities for inputs on this grid: unsigned from 0.

    So masked ones stay exactly 0. The rule stays. A rule with only signed grids (binary, the floats) gets a signed one,
    whose 0 is exact too. A rule without a symmetric grid (lsq_plus) becomes "lsq".
    """
    signed = replace(spec, signed=True, symmetric=True, narrow_range=False)
    unsigned = replace(signed, signed=False)
    return _first_possible("the probabilities", unsigned, signed, unsigned.changed({"rule": "lsq"}))


def _first_possible(tensor: str, *specs: QuantSpec) -> QuantSpec:
    for spec in specs:  # asked by making a quantizer, which refuses what the rule lacks
        try:
            create_quantizer(spec, "activation", (), "meta")
            return spec
        except ValueError as error:
            reason = error
    raise ValueError(f"QuantMultiheadAttention: no grid for {tensor}: {reason}") from reason


@register_twin(nn.MultiheadAttention)
class QuantMultiheadAttention(CompositeTwin, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with quantized products.

    Inputs, weights, q, k, v and probabilities are quantized. With Q for a quantizer of learned scale, per head: q, k, v
    = Q(W) Q(x) + bias of query, key, value; p = Q(softmax(Q(q) Q(k)^T / sqrt(head_dim) + mask)); output = Q(W_out)
    Q(concat(p Q(v))) + b_out. Keys and values are quantized together with bias_k, bias_v and the zeros of
    add_zero_attn. Evaluation computes the projections on integers, with biases rounded to int32. The weights keep
    torch's names. Added modules are `query_projection`, `key_projection`, `value_projection` (`QuantFunction`s on
    in_proj_weight's thirds or on q/k/v_proj_weight), `out_proj` (a `QuantLinear`) and the four quantizers of `attend`.

    Arguments as of `torch.nn.MultiheadAttention`, and those of `QuantLayer`: activation_spec is the grid of the inputs
    and of out_proj's input, None: weights only; q, k, v and the probabilities get those of `operand_spec` and
    `probability_spec`.

    >>> layer = QuantMultiheadAttention(8, 2, batch_first=True, activation_spec=None)
    >>> x = torch.randn(3, 5, 8)
    >>> output, weights = layer(x, x, x)
    >>> output.shape, weights.shape
    (torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))
    """

    out_proj: QuantLinear  # type: ignore[assignment]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: ActivationSpec = "default",
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        # torch's transformer layers read this before they replace self_attn.forward by one fused float operation.
        self._qkv_same_embed_dim = False
        out_proj: nn.Linear = self.out_proj
        self.out_proj = QuantLinear(**QuantLinear.constructor_arguments(out_proj), device="meta", activation_spec=None)
        share_parameters(out_proj, self.out_proj)
        self.add_quantizers(weight_spec, activation_spec)

    def add_quantizers(self, weight_spec: QuantSpec | None, activation_spec: ActivationSpec) -> None:
        device = self.out_proj.weight.device
        for name, (weight, _) in self.inner_weights().items():
            projection = QuantFunction(F.linear, tuple(weight.shape), None, weight_spec, activation_spec, device)
            if not weight.is_meta:  # else `from_float` calls again, with the real weights
                projection.fit_weight(weight)
            self.add_module(name, projection)
        self.out_proj.add_quantizers(weight_spec, activation_spec)
        spec = resolved_input_spec(activation_spec)
        operand = None if spec is None else operand_spec(spec)
        probability = None if spec is None else probability_spec(spec)
        for name in OPERANDS:
            self.register_module(name, quantizer_or_none(operand, device))
        self.register_module(PROBABILITIES, quantizer_or_none(probability, device))

    def inner_weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        return dict(zip(PROJECTIONS, projections(self), strict=True))

    @classmethod
    def check_float(cls, layer: nn.Module) -> None:
        super().check_float(layer)
        out_proj = layer.get_submodule("out_proj")
        known: tuple[type, ...] = (nn.Linear, NonDynamicallyQuantizableLinear)  # the second is torch's own
        if parametrize.type_before_parametrizations(out_proj) not in known:
            raise TypeError(f"{cls.__name__}.from_float: out_proj must be a Linear, got {type(out_proj).__name__}")

    @staticmethod
    def share(source: nn.Module, target: nn.Module) -> None:
        share_parameters(source, target)
        share_parameters(source.get_submodule("out_proj"), target.get_submodule("out_proj"))

    @staticmethod
    def constructor_arguments(layer: Any) -> dict[str, Any]:
        names = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
        return {name: getattr(layer, name) for name in names} | {
            "bias": layer.in_proj_bias is not None,
            "add_bias_kv": layer.bias_k is not None,
            "dtype": layer.out_proj.weight.dtype,
        }

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with the arguments and results of `torch.nn.MultiheadAttention`.

        The probabilities are quantized. As in torch, a fully masked row gives NaN with need_weights, zeros without. A
        mask of integers is a TypeError; wrong shapes, nested tensors, or is_causal without attn_mask are a ValueError.
        """
        self._check(query, key, value, is_causal and attn_mask is None)
        weights = self.inner_weights()

        def project(name: str, x: Tensor) -> Tensor:
            y: Tensor = self.out_proj(x) if name == "out_proj" else getattr(self, name)(x, *weights[name])
            return y

        def quantize(name: str, x: Tensor) -> Tensor:
            quantizer = getattr(self, name)
            y: Tensor = x if quantizer is None else quantizer(x)
            return y

        return multihead_attention(
            self, query, key, value, (attn_mask, key_padding_mask), project, quantize,
            single=query.dim() == 2, need_weights=need_weights, average=average_attn_weights,
        )  # fmt: skip

    def _check(self, query: Tensor, key: Tensor, value: Tensor, lacks_mask: bool) -> None:
        where = type(self).__name__
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.is_nested:
                raise ValueError(
                    f"{where}: {name} is a nested tensor; pad it (nn.TransformerEncoder: enable_nested_tensor=False)"
                )
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                axes = "2 or 3" if name == "query" else str(query.dim())
                raise ValueError(f"{where}: {name} must have {axes} axes, the last of {width}, got {tuple(x.shape)}")
        if lacks_mask:
            raise ValueError(f"{where}: is_causal=True is only a hint and needs the causal mask as attn_mask")
