"""Attention as separate operations, so that each of them gets a grid."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from qat.layers import attention_core


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """`F.scaled_dot_product_attention` as two matrix products and the operations between them.

    softmax(query @ key.T * scale + mask) @ value, with dropout on the probabilities.

    Shapes: query (..., L, E), key (..., S, E), value (..., S, Ev), attn_mask broadcastable to (..., L, S).
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    mask = None
    if is_causal:
        above = torch.ones((query.size(-2), key.size(-2)), dtype=torch.bool, device=query.device).triu(1)
        mask = torch.zeros_like(above, dtype=query.dtype).masked_fill(above, -math.inf)
    if attn_mask is not None:
        given = attn_mask
        if given.dtype == torch.bool:
            given = torch.zeros_like(given, dtype=query.dtype).masked_fill(given.logical_not(), -math.inf)
        mask = given if mask is None else mask + given
    attended, _ = attention_core.attend(query, key, value, mask, _as_it_is, scale, dropout_p, dropout_p > 0)
    return attended


def multi_head_attention(
    module: nn.MultiheadAttention, named: Callable[..., Any], query: Any, key: Any, value: Any,
    key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """`nn.MultiheadAttention` with a projection for each of query, key and value; the mask decides, not `is_causal`.

    `named(name, function, *args)`: calls a function that a layer of this name will replace.
    """
    parameters = dict(zip(attention_core.PROJECTIONS, attention_core.projections(module), strict=True))

    def project(name: str, x: Any) -> Any:
        return module.out_proj(x) if name == "out_proj" else named(name, F.linear, x, *parameters[name])

    return attention_core.multihead_attention(
        module, query, key, value, (attn_mask, key_padding_mask), project, _as_it_is,
        single=query.dim() == 2, need_weights=need_weights, average=average_attn_weights,
    )  # fmt: skip


def _as_it_is(name: str, tensor: Any) -> Any:
    return tensor
