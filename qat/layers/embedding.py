"""QuantEmbedding: a table of vectors kept as integers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.collectives import whole
from qat.functional import lsq_plus_quantize, lsq_quantize
from qat.layers.base import QuantLayer
from qat.layers.twins import ActivationSpec, register_twin
from qat.quantizer.granularity import to_groups
from qat.quantizer.registry import estimator_of
from qat.spec import QuantSpec
from qat.torch_internals import has_forward_hooks


@dataclass(frozen=True)
class IntegerTable:
    """Integers of a deployed table: weight = (codes - zero_point) * scale."""

    codes: Tensor  # (num_embeddings, embedding_dim), integers (as floats)
    scale: Tensor  # > 0; () per tensor, (num_embeddings, 1) per row, (num_embeddings, groups, 1) per group of columns
    zero_point: Tensor  # integers (as floats) in the shape of scale; 0 on a symmetric grid


@register_twin(nn.Embedding)
class QuantEmbedding(QuantLayer, nn.Embedding):
    """`torch.nn.Embedding` with a quantized table.

    Indices have no grid, and a row is read as it is stored. So training and evaluation compute the same, the
    dequantized values of an integer table. With the rule "lsq", one scale for the table or for each row and no EWGS,
    only the rows that are looked up are quantized: values and gradients are those of the whole table at the cost of
    the batch. Other rules, and a weight_quantizer with forward hooks, see the whole table.

    Arguments as of `torch.nn.Embedding`, and weight_spec: grid of the table; what it leaves open: 8 bits, symmetric,
    narrow, per row. An activation_spec is a ValueError: each row of the result lies on its own grid, so a consumer that
    needs one grid quantizes the vectors again. So is sparse=True with a rule other than "lsq", groups, or EWGS.

    Shapes: input (*) of int32 or int64, output (*, embedding_dim).

    >>> layer = QuantEmbedding(10, 4, padding_idx=0)
    >>> layer(torch.tensor([[1, 2, 0], [3, 3, 9]])).shape
    torch.Size([2, 3, 4])
    >>> layer.integers().codes.abs().max()
    tensor(127.)
    """

    has_input_grid = False
    argument_names = (
        "num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse",
    )  # fmt: skip

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: None = None,
    ) -> None:
        nn.Embedding.__init__(
            self, num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight,
            _freeze, device, dtype,
        )  # fmt: skip
        self.add_quantizers(weight_spec, activation_spec)

    def add_quantizers(self, weight_spec: QuantSpec | None, activation_spec: ActivationSpec) -> None:
        """Create the table's quantizer; refuse an activation_spec, or unfit sparse=True."""
        if activation_spec not in (None, "default"):
            raise ValueError(
                f"QuantEmbedding: activation_spec must be None, since indices are exact; got {activation_spec!r}"
            )
        super().add_quantizers(weight_spec, None)
        if self.sparse and not self._is_row_by_row():
            spec = self.weight_quantizer.spec
            raise ValueError(
                "QuantEmbedding: sparse=True needs a weight_spec of rule 'lsq', granularity 'tensor' or 'channel' and"
                f" ewgs 'none', got {spec.rule!r}, {spec.granularity!r} and {spec.ewgs!r}"
            )

    def calibrate_weight(self) -> None:
        self.fit_weight(self.bounded_table())  # the rows as look-ups see them

    @torch.no_grad()
    def integers(self) -> IntegerTable:  # type: ignore[override]
        """Return the table's integers, for export; a ValueError if the rule has none."""
        quantizer = self.weight_quantizer
        if not quantizer.exportable:
            raise ValueError(f"{type(self).__name__}.integers: its weight {quantizer.refusal()}")
        table = self.bounded_table()
        scale, zero_point = quantizer.grid(to_groups(table, quantizer.spec))
        return IntegerTable(quantizer.codes(table), scale.detach(), zero_point.detach())

    @torch.no_grad()
    def bounded_table(self) -> Tensor:
        """Return the float table within max_norm; a copy if there is a max_norm."""
        weight = whole(self.weight.detach())
        if self.max_norm is None:
            return weight
        everything = torch.arange(self.num_embeddings, device=weight.device)  # every index
        return torch.embedding_renorm_(weight.clone(), everything, self.max_norm, self.norm_type)

    def look_up(self, indices: Tensor) -> Tensor:
        """Return the quantized rows at these indices."""
        weight = self.weight
        if self.max_norm is not None:  # shortens the float rows in place, as in torch
            with torch.no_grad():
                torch.embedding_renorm_(weight.detach(), indices.contiguous(), self.max_norm, self.norm_type)
        # Hooks, an observer or the warning of an uncalibrated quantizer need its call.
        quantizer = self.weight_quantizer
        silent = quantizer.is_calibrated and not quantizer.passes and (self.sparse or not has_forward_hooks(quantizer))
        if silent and self._is_row_by_row():
            return self._quantized_rows(indices, weight)
        if self.max_norm is not None:
            # Autograd may keep the table, and the next look-up of the same step may shorten rows in it.
            weight = weight.clone()
        sparse = self.sparse and quantizer.is_disabled  # else the gradient of a whole quantized table
        return F.embedding(
            indices, self.quantized(weight), self.padding_idx, None, 2.0, self.scale_grad_by_freq, sparse
        )

    def _quantized_rows(self, indices: Tensor, weight: Tensor) -> Tensor:
        quantizer = self.weight_quantizer
        if quantizer.training:
            quantizer.repair()
        options = (self.padding_idx, None, 2.0, self.scale_grad_by_freq)  # of the scales' gradients too
        scale, zero_point = (part.expand(self.num_embeddings, 1) for part in quantizer.grid())
        x = F.embedding(indices, weight, *options, self.sparse)
        step = F.embedding(indices, scale, *options)
        factor = quantizer.gradient_factor(weight)
        if quantizer.zero_point is None:
            return lsq_quantize(x, step, *quantizer.bounds(), factor)
        return lsq_plus_quantize(x, step, F.embedding(indices, zero_point), *quantizer.bounds(), factor)

    def _is_row_by_row(self) -> bool:
        # True if a quantized row and its gradient depend only on the row and its scale.
        quantizer = self.weight_quantizer
        plain = quantizer.spec.granularity != "group" and quantizer.spec.ewgs == "none"
        return estimator_of(quantizer) == "lsq" and plain

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return self.look_up(input)
