"""What layers refuse: (call, error, what the sentence names), each sentence beginning with the layer's name."""

from typing import Any

import pytest
import torch
from torch import nn

from qat.layers import (
    QuantBilinear,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantEmbedding,
    QuantEmbeddingBag,
    QuantGRU,
    QuantLinear,
    QuantLSTM,
    QuantMultiheadAttention,
    QuantRNN,
)
from qat.spec import QuantSpec
from tests.layers.twin_case import grid_for
from tests.references.rule_specs import plain

X, ROWS, APOT = torch.zeros(4, 3, 8), torch.zeros(2, 3, 4), QuantSpec(bits=4, rule="apot")
ONE_BIT = plain(bits=1, signed=False)


def nested_call() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    inner: Any = encoder.layers[0]
    inner.self_attn = QuantMultiheadAttention.from_float(inner.self_attn)
    with torch.no_grad():
        encoder(torch.randn(2, 4, 8), src_key_padding_mask=torch.tensor([[False] * 4, [False, False, True, True]]))


def replaced_out_proj() -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(8, 2)
    layer.out_proj = QuantLinear(8, 8)  # type: ignore[assignment]
    return layer


def attention(*inputs: Any, **options: Any) -> Any:
    return QuantMultiheadAttention(8, 2)(*inputs, **options)


MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (lambda: QuantLinear(2, 2, activation_spec=8), TypeError,  # type: ignore[arg-type]
     "activation_spec must be a QuantSpec, None or 'default', got 8"),
    (lambda: QuantConvTranspose1d(2, 2, 3, activation_spec=None)(torch.zeros(1, 2, 6), [8]), TypeError, "output_size="),
    (lambda: QuantConvTranspose2d(1, 1, 1, padding_mode="reflect"), ValueError, "QuantConvTranspose2d"),
    (lambda: QuantBilinear(5, 7, 4).integers(grid_for(torch.ones(1))), ValueError, "other_quantizer"),
    # attention
    (lambda: QuantMultiheadAttention.from_float(replaced_out_proj()), TypeError,
     "out_proj must be a Linear, got QuantLinear"),
    (lambda: attention(X, X, X, is_causal=True), ValueError, "is_causal=True"),
    (lambda: attention(X, X, X, attn_mask=torch.zeros(4, 4, dtype=torch.int64)), TypeError, "attn_mask .* torch.int64"),
    (lambda: QuantMultiheadAttention(8, 2, kdim=5)(X, X, X), ValueError,
     r"key must have 3 axes, the last of 5, got \(4, 3, 8\)"),
    (lambda: attention(X[None], X, X), ValueError, r"query must have 2 or 3 axes, the last of 8, got \(1, 4, 3, 8\)"),
    (lambda: QuantMultiheadAttention(8, 2, activation_spec=ONE_BIT), ValueError, "q, k and v: .*got bits=1"),
    (nested_call, ValueError, "query is a nested tensor"),
    # recurrent layers
    (lambda: QuantGRU(4, 6)(torch.zeros(2, 3, 5)), ValueError, r"\(L, N, 4\) or \(L, 4\), got \(2, 3, 5\)"),
    (lambda: QuantGRU(4, 6, batch_first=True)(torch.zeros(4)), ValueError, r"\(N, L, 4\) or \(L, 4\), got \(4,\)"),
    (lambda: QuantRNN(4, 6, batch_first=True)(torch.zeros(2, 0, 4)), ValueError, r"at least one step.*\(2, 0, 4\)"),
    (lambda: QuantRNN(4, 6)(ROWS, torch.zeros(1, 6)), ValueError, r"h_0 must have shape \(1, 3, 6\), got \(1, 6\)"),
    (lambda: QuantLSTM(4, 6)(ROWS[0], (torch.zeros(1, 6), torch.zeros(1, 5))), ValueError,
     r"c_0 must have shape \(1, 6\), got \(1, 5\)"),
    (lambda: QuantLSTM(4, 6)(ROWS, torch.zeros(1, 3, 6)), TypeError, "hx must be a pair.*got Tensor"),
    # tables
    (lambda: QuantEmbedding(3, 2, activation_spec=QuantSpec()), ValueError,  # type: ignore[arg-type]
     "activation_spec must be None"),
    (lambda: QuantEmbeddingBag.from_float(nn.EmbeddingBag(3, 2), None, QuantSpec()), ValueError,
     "activation_spec must be None"),
    (lambda: QuantEmbedding(3, 2, sparse=True, weight_spec=QuantSpec(rule="dorefa")), ValueError,
     "sparse=True .*got 'dorefa', 'channel' and 'none'"),
    (lambda: QuantEmbeddingBag(3, 2, sparse=True, mode="max"), ValueError, "sparse=True .*'max'"),
    (lambda: QuantEmbeddingBag(3, 2, scale_grad_by_freq=True, mode="max"), ValueError, "scale_grad_by_freq=True"),
    (lambda: QuantEmbedding(3, 2, weight_spec=APOT).integers(), ValueError, "'apot', whose values lie on no integer"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize(("call", "error", "fact"), MISTAKES, ids=[fact[:40] for _, _, fact in MISTAKES])
def test_a_mistake_is_refused(call: Any, error: type[Exception], fact: str) -> None:
    with pytest.raises(error, match=fact):
        call()
