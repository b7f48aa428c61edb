"""Attention as separate operations, so that each of them gets a grid."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.layers import attention_core
from qat.tracing.nodes import dimensions

LAYER_NAME = "qat_layer_name"
"""Key of node.meta: the name, within its module, of the layer that replaces a function."""


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
    module: nn.MultiheadAttention, query: Any, key: Any, value: Any, key_padding_mask: Any = None,
    need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """`nn.MultiheadAttention` with one projection each for query, key and value.

    Arguments as in its forward; `is_causal` is only a hint there, and the mask decides.
    """
    known = isinstance(query, fx.Proxy) and dimensions(query.node) is not None
    single = known and query.dim() == 2  # a guard in the graph checks it
    if single:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    elif not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    mask = attention_core.additive_mask(attn_mask, key_padding_mask, module.num_heads, query.dtype)
    parameters = dict(zip(attention_core.PROJECTIONS, projections(module), strict=True))

    def project(name: str, x: Any) -> Any:
        if name == "out_proj":
            return module.out_proj(x)
        projected: Any = F.linear(x, *parameters[name])
        projected.node.meta[LAYER_NAME] = name
        return projected

    output, probabilities = attention_core.multihead_attention(
        module, query, key, value, mask, project, _as_it_is, safe=not need_weights
    )
    weights = None
    if need_weights:
        weights = probabilities.mean(1) if average_attn_weights else probabilities
    if single:
        return output.squeeze(0), None if weights is None else weights.squeeze(0)
    return (output if module.batch_first else output.transpose(0, 1)), weights


def projections(module: nn.MultiheadAttention) -> list[tuple[Any, Any]]:
    """Weight and bias of the query's, the key's and the value's projection."""
    size = module.embed_dim
    spans = [slice(size * part, size * (part + 1)) for part in range(3)]
    bias = module.in_proj_bias
    biases = [None] * 3 if bias is None else [bias[span] for span in spans]
    weight = module.in_proj_weight
    separate = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    weights = separate if weight is None else [weight[span] for span in spans]
    return list(zip(weights, biases, strict=True))


def _as_it_is(name: str, tensor: Any) -> Any:
    return tensor
