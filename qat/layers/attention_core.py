"""Arithmetic of attention, with projections and quantizers passed in."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (name of the quantizer, tensor) to the tensor on its grid; returning the tensor itself leaves it in float.
Quantize = Callable[[str, Tensor], Tensor]

PROJECTIONS = ("query_projection", "key_projection", "value_projection")
OPERANDS = ("query_quantizer", "key_quantizer", "value_quantizer")
PROBABILITIES = "probability_quantizer"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    quantize: Quantize,
    scale: float | None = None,
    dropout: float = 0.0,
    training: bool = False,
    safe: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(query key^T * scale + mask) value on quantized operands.

    Probabilities are quantized too, and returned. Scaling, mask and softmax are float. Masked probabilities are exactly
    0, before and after quantization. Dropout acts after the quantizer, so that its range is the same in training and
    evaluation. torch.fx can trace it.

    Args:
        query, key, value: (..., L, E), (..., S, E) and (..., S, V).
        mask: added to the scores, broadcastable to (..., L, S); -inf to leave a key out.
        quantize: called with the names in OPERANDS, and PROBABILITIES.
        scale: default 1/sqrt(E), which needs E as a number.
        safe: True to make a fully masked row zeros, as in `F.scaled_dot_product_attention`; else it is NaN.
    """
    query, key, value = (quantize(name, x) for name, x in zip(OPERANDS, (query, key, value), strict=True))
    scores = torch.matmul(query, key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        probabilities = torch.softmax(scores, -1)
    elif safe:
        # The first `where` avoids NaN, which would reach the gradient in spite of the second.
        empty = (mask == -math.inf).all(-1, keepdim=True)
        probabilities = torch.softmax(torch.where(empty, 0.0, scores + mask), -1)
        probabilities = torch.where(empty, 0.0, probabilities)
    else:
        probabilities = torch.softmax(scores + mask, -1)
    probabilities = quantize(PROBABILITIES, probabilities)
    probabilities = F.dropout(probabilities, dropout, training and dropout > 0)
    return torch.matmul(probabilities, value), probabilities


def multihead_attention(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    project: Callable[[str, Tensor], Tensor],
    quantize: Quantize,
    *,
    single: bool,
    need_weights: bool,
    average: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute `nn.MultiheadAttention` with projections and quantizers passed in.

    masks are attn_mask and key_padding_mask. torch.fx can trace it (for sizes that are proxies too), torch.export and
    torch.compile run it. `project` is called with "query_projection", "key_projection", "value_projection" and
    "out_proj". bias_k and add_zero_attn add 1 each to the last axis of the probabilities (N, num_heads, L, S).
    `single`: True for one sequence, without N.
    """
    attn_mask, padding = masks
    if single:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        padding = None if padding is None else padding.unsqueeze(0)
    elif not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    mask = additive_mask(attn_mask, padding, module.num_heads, query.dtype)
    samples, heads = query.shape[0], module.num_heads
    queries, keys, values = (project(name, x) for name, x in zip(PROJECTIONS, (query, key, value), strict=True))
    if module.bias_k is not None and module.bias_v is not None:
        keys = torch.cat([keys, module.bias_k.expand(samples, -1, -1)], 1)
        values = torch.cat([values, module.bias_v.expand(samples, -1, -1)], 1)
        # Padded with 0: no mask reaches the added key.
        mask = None if mask is None else F.pad(mask, (0, 1))
    if module.add_zero_attn:
        keys, values = F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1))
        mask = None if mask is None else F.pad(mask, (0, 1))
    # (N, heads, length, head_dim)
    queries, keys, values = (
        torch.unflatten(x, -1, (heads, module.head_dim)).transpose(1, 2) for x in (queries, keys, values)
    )
    scale = module.head_dim**-0.5
    attended, probabilities = attend(
        queries, keys, values, mask, quantize, scale, module.dropout, module.training, safe=not need_weights
    )
    output, weights = project("out_proj", attended.transpose(1, 2).flatten(2)), None
    if need_weights:
        weights = probabilities.mean(1) if average else probabilities
    if single:
        return output.squeeze(0), None if weights is None else weights.squeeze(0)
    return (output if module.batch_first else output.transpose(0, 1)), weights


def projections(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of the query's, the key's and the value's projection."""
    size = module.embed_dim
    spans = [slice(size * part, size * (part + 1)) for part in range(3)]
    bias = module.in_proj_bias
    biases: list[Tensor | None] = [None] * 3 if bias is None else [bias[span] for span in spans]
    weight = module.in_proj_weight  # None where keys or values have a width of their own
    separate = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    weights = separate if weight is None else [weight[span] for span in spans]
    return list(zip(weights, biases, strict=True))


def additive_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Add both masks of `nn.MultiheadAttention` up to one; None without a mask.

    It is for adding to the scores. attn_mask is (L, S) or (N * num_heads, L, S), key_padding_mask (N, S): bool, True to
    leave a key out, or float to be added. The result is (N or 1, num_heads or 1, L or 1, S).
    """
    total = None
    if attn_mask is not None:
        mask = _to_add(attn_mask, "attn_mask", dtype)
        total = mask[None, None] if mask.dim() == 2 else torch.unflatten(mask, 0, (-1, num_heads))
    if key_padding_mask is not None:
        mask = _to_add(key_padding_mask, "key_padding_mask", dtype)[:, None, None]
        total = mask if total is None else total + mask
    return total


def _to_add(mask: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    if not mask.is_floating_point():
        raise TypeError(f"QuantMultiheadAttention: {name} must be bool or floating point, got {mask.dtype}")
    return mask.to(dtype)
