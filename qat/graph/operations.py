"""The table of operations: how torch calls each, and what it does to a grid; one row, which everything else asks."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from qat.targets.profile import Operation

Kind = Literal[
    "move",  # values stay as they are, and so do integers as bytes
    "split",  # the same, into several tensors
    "max",  # each result is one of the values
    "dropout",  # values stay in evaluation alone
    "clip",  # belongs to its producer, whose integers it bounds
    "curve",  # a function of one value
    "norm",
    "nonlinear",  # any other function, in float between integers
    "average",  # linear, of one tensor: in integers if it and the result are quantized
    "join",  # of several tensors: in integers if operands and result are quantized
    "product",  # of two activations, in integers if it can be
    "float product",  # F.linear and F.conv of no parameter, and what no runtime has in integers
    "question",  # reads no value
    "other",
]


@dataclass(frozen=True)
class Row:
    """An operation.

    Attributes:
        kind: what it does to a grid.
        modules, functions, methods: how torch calls it.
        name: under which targets know it.
        bounds: of a clip; a module's min_val and max_val count before them.
        fused: name of the curve in the kernels that compute it and the quantizer behind it.
        options: values that other arguments must have for `fused`.
        reads: attributes of the modules that a fused graph is derived from; None: it calls the modules.
        keeps_all: True if a move drops, repeats and joins nothing, so that a fused step follows it.
        propagated: False if ONNX Runtime loses the grid on the way: it would compute the next operation in float.
        own_memory: if the result never shares memory with an input, except with `inplace`; None: as its kind.
        homogeneous: True if f(s * x) = s * f(x) for s > 0.
    """

    kind: Kind
    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    name: Operation | None = None
    bounds: tuple[float, float] | None = None
    fused: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    reads: tuple[str, ...] | None = None
    keeps_all: bool = False
    propagated: bool = True
    own_memory: bool | None = None
    homogeneous: bool = False


IN_PLACE, INDICES, BOUNDS = ("inplace",), ("return_indices",), ("inplace", "min_val", "max_val")
WINDOW = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")

TABLE = (
    Row("move", (nn.Identity,), reads=(), keeps_all=True, homogeneous=True),
    Row("move", (nn.Flatten,), (torch.flatten,), ("flatten",), reads=(), keeps_all=True),
    Row("move", (nn.Unflatten,), (torch.unflatten,), ("unflatten",), reads=(), keeps_all=True),
    Row("move", (), (torch.reshape,), ("reshape", "view"), keeps_all=True),
    Row("move", (), (torch.permute,), ("permute",), keeps_all=True),
    Row("move", (), (torch.transpose,), ("transpose",), keeps_all=True),
    Row("move", (), (torch.squeeze,), ("squeeze",), keeps_all=True),
    Row("move", (), (torch.unsqueeze,), ("unsqueeze",), keeps_all=True),
    Row("move", (), (torch.swapaxes, torch.movedim), ("swapaxes", "movedim", "t", "contiguous")),
    Row("move", (), (torch.clone,), ("clone",), own_memory=True),
    Row("move", (), (torch.roll, torch.repeat_interleave), ("roll", "repeat_interleave", "repeat"),
        propagated=False, own_memory=True),
    Row("move", (), (operator.getitem, torch.select, torch.narrow), ("select", "narrow", "expand"), propagated=False),
    Row("move", (nn.ChannelShuffle, nn.PixelShuffle, nn.PixelUnshuffle), (torch.channel_shuffle, torch.pixel_shuffle),
        reads=(), propagated=False),
    Row("split", (), (torch.chunk, torch.split), ("chunk", "split")),
    Row("max", (nn.MaxPool2d,), (F.max_pool2d,), reads=WINDOW),
    Row("max", (nn.MaxPool1d, nn.MaxPool3d), (F.max_pool1d, F.max_pool3d), reads=INDICES),
    Row("max", (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), (F.adaptive_max_pool2d,),
        reads=INDICES, propagated=False),
    Row("dropout", (nn.Dropout,), (F.dropout,), reads=IN_PLACE, homogeneous=True),
    Row("dropout", (nn.Dropout1d,), (F.dropout1d,), reads=IN_PLACE, homogeneous=True),
    Row("dropout", (nn.Dropout2d,), (F.dropout2d,), reads=IN_PLACE, homogeneous=True),
    Row("dropout", (nn.Dropout3d,), (F.dropout3d,), reads=IN_PLACE, homogeneous=True),
    Row("dropout", (nn.AlphaDropout,), (F.alpha_dropout,), reads=IN_PLACE),
    Row("dropout", (nn.FeatureAlphaDropout,), (F.feature_alpha_dropout,), reads=IN_PLACE),

    Row("clip", (nn.ReLU,), (F.relu, torch.relu, F.relu_), ("relu", "relu_"), bounds=(0.0, math.inf), reads=IN_PLACE,
        homogeneous=True),
    Row("clip", (nn.ReLU6,), (F.relu6,), bounds=(0.0, 6.0), reads=BOUNDS),
    Row("clip", (nn.Hardtanh,), bounds=(-1.0, 1.0), reads=BOUNDS),
    Row("clip", (), (F.hardtanh, torch.clamp, torch.clip, torch.clamp_min, torch.clamp_max),
        ("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max")),  # by their arguments
    Row("curve", (nn.SiLU,), (F.silu,), name="silu", fused="silu", reads=IN_PLACE),
    Row("curve", (nn.Hardswish,), (F.hardswish,), name="hardswish", fused="hardswish", reads=IN_PLACE),
    Row("curve", (nn.GELU,), (F.gelu,), name="gelu", fused="gelu", options={"approximate": "none"},
        reads=("approximate",)),
    Row("curve", (nn.GELU,), (F.gelu,), name="gelu", fused="gelu_tanh", options={"approximate": "tanh"},
        reads=("approximate",)),
    Row("curve", (nn.Sigmoid,), (F.sigmoid, torch.sigmoid), ("sigmoid", "sigmoid_"), "sigmoid"),
    Row("curve", (nn.Tanh,), (F.tanh, torch.tanh), ("tanh", "tanh_"), "tanh"),
    Row("curve", (nn.Hardsigmoid,), (F.hardsigmoid,), name="hardsigmoid"),
    Row("curve", (nn.ELU,), (F.elu,), name="elu"),
    Row("curve", (nn.Mish,), (F.mish,), name="mish"),
    Row("curve", (nn.LeakyReLU,), (F.leaky_relu,), name="leaky_relu"),
    Row("nonlinear", (nn.PReLU,), (F.prelu,), name="prelu"),
    Row("nonlinear", (nn.Softmax,), (F.softmax, torch.softmax), ("softmax",), "softmax", reads=("dim",)),
    Row("nonlinear", (nn.LogSoftmax,), (F.log_softmax, torch.log_softmax), ("log_softmax",), "log_softmax"),
    Row("norm", (nn.LayerNorm,), (F.layer_norm,), name="layer_norm"),
    Row("norm", (nn.GroupNorm,), (F.group_norm,), name="group_norm"),
    Row("norm", (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), (F.instance_norm,), name="instance_norm"),
    Row("average", (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
        name="avg_pool"),
    Row("average", (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), name="avg_pool"),
    Row("average", (), (torch.mean,), ("mean",), "mean"),
    Row("average", (nn.Upsample,), (F.interpolate,), name="interpolate"),
    Row("join", (), (operator.add, torch.add), ("add", "add_"), "add"),
    Row("join", (), (operator.sub, torch.sub), ("sub", "sub_"), "sub"),
    Row("join", (), (operator.mul, torch.mul), ("mul", "mul_"), "mul"),
    Row("join", (), (operator.truediv, torch.div), ("div", "div_"), "div"),
    Row("join", (), (torch.maximum,), ("maximum",), "maximum"),
    Row("join", (), (torch.minimum,), ("minimum",), "minimum"),
    Row("join", (), (torch.cat, torch.concat), (), "cat"),
    Row("join", (), (torch.stack,), (), "stack"),
    Row("product", (), (operator.matmul, torch.matmul, torch.bmm, torch.mm), ("matmul", "bmm", "mm", "__matmul__")),
    Row("product", (), (torch.einsum,), own_memory=False),  # which may transpose only
    Row("float product", (), (
        torch.addmm, torch.addbmm, torch.baddbmm, torch.tensordot, torch.mv, torch.dot, F.bilinear, F.conv1d, F.conv2d,
        F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear, F.embedding,
        torch.embedding_bag,
    )),
    Row("question", methods=("dim", "ndimension", "size", "numel", "shape", "ndim", "dtype", "device")),
    Row("other", (), (F.pad,), propagated=False, own_memory=False),  # `passes_grid` asks for its value
    Row("other", (), (), (
        "abs", "amax", "amin", "batch_norm", "cos", "cosine_similarity", "cumsum", "eq", "erf", "exp", "floordiv", "ge",
        "gt", "le", "log", "logsigmoid", "lt", "masked_fill", "max", "min", "ne", "neg", "ones_like", "pow", "prod",
        "reciprocal", "rms_norm", "rsqrt", "sin", "softplus", "sqrt", "square", "std", "sum", "topk", "var", "where",
        "zeros_like",
    )),
)  # fmt: skip


class Calls(NamedTuple):
    """Modules, functions and tensor methods that do the same."""

    modules: tuple[type[nn.Module], ...]
    functions: frozenset[Callable[..., Any]]
    methods: frozenset[str]


def calls_where(holds: Callable[[Row], bool]) -> Calls:
    """Return how torch calls the operations of which `holds` is true."""
    rows = [row for row in TABLE if holds(row)]
    return Calls(
        tuple(dict.fromkeys(module for row in rows for module in row.modules)),
        frozenset(function for row in rows for function in row.functions),
        frozenset(method for row in rows for method in row.methods),
    )


def calls_of(*kinds: Kind) -> Calls:
    """Return how torch calls the operations of these kinds."""
    return calls_where(lambda row: row.kind in kinds)


def by_name(*kinds: Kind) -> dict[Operation, Calls]:
    """Return how torch calls the operations of these kinds, by their names."""
    names = dict.fromkeys(row.name for row in TABLE if row.kind in kinds and row.name is not None)
    return {name: calls_where(lambda row, name=name: row.name == name) for name in names}  # type: ignore[misc]


DROPOUTS, CLIPS = calls_of("dropout"), calls_of("clip")
PRODUCTS, FLOAT_PRODUCTS = calls_of("product"), calls_of("float product")
JOINING, AVERAGING, NONLINEAR = by_name("join"), by_name("average"), by_name("curve", "norm", "nonlinear")
