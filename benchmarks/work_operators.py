"""Operators as `integer_work` counts them: which move values, which multiply what, and formulas that torch lacks.

torch.utils.flop_counter has no formula for matrix times vector, `Bilinear`, the fused recurrent layers that evaluation
uses on the CPU and on CUDA, or (up to torch 2.11) the CPU's fused attention. It counts 0 for them, so that a float LSTM
would look like no work.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from qat.torch_internals import BILINEAR_OPERATOR, CPU_ATTENTION_OPERATOR, CUDNN_RECURRENT_OPERATOR, pytree

aten = torch.ops.aten

Shape = Sequence[int]

FACTORS: dict[Any, tuple[int, int]] = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.mv: (0, 1),
    aten.dot: (0, 1),
    aten.addmm: (1, 2),
    aten.addmv: (1, 2),
    aten.baddbmm: (1, 2),
    aten.addbmm: (1, 2),
    aten.convolution: (0, 1),
}
"""Operator to the positions of its two factors. Other operators are not single products and count as float work."""

_MOVING = (
    "clone", "roll", "flip", "repeat", "index", "index_select", "gather", "im2col", "unfold_copy",
    "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle",
    "max_pool2d", "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d",
)  # fmt: skip
MOVING = frozenset(getattr(aten, name) for name in _MOVING)
"""Operators that copy values of their first argument into new memory; views share memory and are not listed."""


def moves_values(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether every value of the result is one of the first argument's values, or 0, which is on every grid."""
    if operator is aten.constant_pad_nd:
        return bool((args[2] if len(args) > 2 else kwargs.get("value", 0)) == 0)
    return operator in MOVING


def macs_of(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Multiply-accumulates of one call: by the formulas here, or half of torch's floating-point operations.

    Args:
        operator: an OpOverloadPacket, such as torch.ops.aten.mm.
        args, kwargs, result: of the call.
    """
    own = FORMULAS.get(operator)
    if own is not None:
        return own(*pytree.tree_map_only(Tensor, lambda tensor: tensor.shape, tuple(args)))
    if operator is _deformable_convolution():
        return int(result.numel() * args[1][0].numel())  # the interpolation is not counted
    known = flop_registry.get(operator)
    return 0 if known is None else int(known(*args, **kwargs, out_val=result)) // 2


def _deformable_convolution() -> Any:
    """torchvision's operator; None unless torchvision was imported."""
    return getattr(torch.ops.torchvision, "deform_conv2d", None)


def _bilinear(first: Shape, weight: Shape, *_: Any) -> int:
    """x1 (rows, in1), weight (out, in1, in2): every row of x1 is multiplied by the whole weight."""
    rows: int = math.prod(first) // weight[-2]
    return rows * math.prod(weight)


def _mkldnn_recurrent(x: Shape, input_weight: Shape, hidden_weight: Shape, *_: Any) -> int:
    """One layer and direction."""
    return math.prod(x[:-1]) * (math.prod(input_weight) + math.prod(hidden_weight))


def _recurrent(x: Shape, weights: Sequence[Shape], *_: Any) -> int:
    """All layers and directions: every step of every sample is multiplied by every matrix."""
    return math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _attention(query: Shape, key: Shape, value: Shape, *_: Any) -> int:
    """query (..., L, E), key (..., S, E), value (..., S, V): L x S x E for the scores, L x S x V for the result."""
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mv: lambda matrix, vector: math.prod(matrix),
    aten.dot: lambda one, other: math.prod(one),
    aten.vdot: lambda one, other: math.prod(one),
    aten.addmv: lambda bias, matrix, vector: math.prod(matrix),
    aten.addbmm: lambda bias, one, other: math.prod(one) * other[-1],
    BILINEAR_OPERATOR: _bilinear,
    aten.mkldnn_rnn_layer: _mkldnn_recurrent,
    CUDNN_RECURRENT_OPERATOR: _recurrent,
    aten.miopen_rnn: _recurrent,
    CPU_ATTENTION_OPERATOR: _attention,
}
"""Operator to its multiply-accumulates, from the shapes of its positional arguments."""
