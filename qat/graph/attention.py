"""Attention as separate operations, so that each of them gets a grid."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.layers import attention_core


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention as two matrix products and the operations between them.

    It has the arguments of `F.scaled_dot_product_attention`:
    softmax(query @ key.T * scale + mask) @ value, with dropout on the probabilities.

    Shapes: query (..., L, E), key (..., S, E), value (..., S, Ev), attn_mask broadcastable to (..., L, S).
    """
    if enable_gqa:  # fewer heads of keys and values: each serves a group of queries
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    mask = None
    if is_causal:
        above = torch.ones((query.size(-2), key.size(-2)), dtype=torch.bool, device=query.device).triu(1)
        mask = torch.zeros_like(above, dtype=query.dtype).masked_fill(above, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
        mask = attn_mask if mask is None else mask + attn_mask
    attended, _ = attention_core.attend(query, key, value, mask, lambda _, x: x, scale, dropout_p, dropout_p > 0)
    return attended


def multi_head_attention(
    module: nn.MultiheadAttention, named: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor,
    key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `nn.MultiheadAttention` with a projection for each of query, key, value.

    The mask decides, not `is_causal`. `named(name, function, *args)` calls a function that a layer of this name will
    replace.
    """
    parameters = dict(zip(attention_core.PROJECTIONS, attention_core.projections(module), strict=True))

    def project(name: str, x: Tensor) -> Tensor:
        projected: Tensor = module.out_proj(x) if name == "out_proj" else named(name, F.linear, x, *parameters[name])
        return projected

    return attention_core.multihead_attention(
        module, query, key, value, (attn_mask, key_padding_mask), project, lambda _, x: x,
        single=query.dim() == 2, need_weights=need_weights, average=average_attn_weights,
    )  # fmt: skip
