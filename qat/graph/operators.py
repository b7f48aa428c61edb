"""ATen operators as the functions, methods and Python operators of forward."""

import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from qat.torch_internals import argument_names, empty_by_default, name_of_operator, pytree

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[str, Any, Args, Kwargs]
"""Operation, target, args and kwargs of a node of torch.fx."""

UNSAID = ("cudnn_enable", "cudnn_enabled", "pin_memory", "layout")
"""Arguments that no function takes, or that change nothing."""

WHOLE = 2**63 - 1
"""The end of a slice that goes to the end."""

CHECKS = (
    "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size", "_assert_async",
)  # fmt: skip
"""Operators without a result that an export adds."""

VMAPPED = ("_add_batch_dim", "_remove_batch_dim")
"""Operators that torch.vmap calls; their results are no tensors outside of it."""

SAME = ("lift_fresh_copy", "lift_fresh", "alias", "contiguous", "resolve_conj", "resolve_neg")
"""Operators whose result stands for their operand."""

PYTHONS: dict[str, Callable[..., object]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "neg": operator.neg,
    "floor_divide": operator.floordiv, "remainder": operator.mod, "__and__": operator.and_, "__or__": operator.or_,
    "bitwise_and": operator.and_, "bitwise_or": operator.or_, "bitwise_not": operator.invert, "pow": operator.pow,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
"""Operators that forward mostly writes as Python's, if they have nothing but their operands."""

METHODS = (
    "reshape", "expand", "permute", "to", "type_as", "repeat", "expand_as", "new_zeros", "new_ones", "new_full",
    "new_empty", "masked_fill", "unfold", "item", "reshape_as", "view_as", "detach",
)  # fmt: skip

ORDER = {
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "instance_norm": ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    "embedding": ("indices", "weight", "padding_idx"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}
"""Functions of `F` that take their arguments in another order than the operator."""

RENAMED: dict[str, Any] = {
    "log_sigmoid": F.logsigmoid, "einsum": torch.einsum, "meshgrid": torch.meshgrid,
    "split_with_sizes": torch.split, "unsafe_split": torch.split,
    "unsafe_chunk": torch.chunk, "_unsafe_view": torch.reshape,
    "upsample_nearest": "nearest", "upsample_linear": "linear",
    "_upsample_nearest_exact": "nearest-exact", "upsample_bilinear": "bilinear", "upsample_bicubic": "bicubic",
    "upsample_trilinear": "trilinear", "_upsample_bilinear_aa": "bilinear", "_upsample_bicubic_aa": "bicubic",
}  # fmt: skip

OF_F = (
    "dropout", "alpha_dropout", "feature_alpha_dropout", "relu", "celu", "selu", "max_pool1d", "max_pool2d",
    "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "adaptive_avg_pool1d",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu", "avg_pool1d",
)  # fmt: skip
"""Functions that are in `F` and in torch, and that people call in `F`."""

HOMES = ((torch, ""), (F, ""), (torch.fft, "fft_"), (torch.linalg, "linalg_"), (torch.special, "special_"))


def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Return torch.topk, of equal values the lowest index first, as ONNX has it.

    On a grid many values are equal, and torch.topk takes any of them. An export records it all the same.
    """
    if torch.compiler.is_exporting():
        return torch.topk(x, k, dim, largest)  # sorted, since the order of others is open too
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> tuple[Tensor, Tensor]:
    """Return torch.sort, of equal values the lowest index first."""
    return topk(x, x.shape[dim], dim, descending)


def argsort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Return torch.argsort, of equal values the lowest index first."""
    return sort(x, dim, descending)[1]


LOWEST_FIRST: dict[Any, Any] = {torch.topk: topk, torch.sort: sort, torch.argsort: argsort}
"""Functions that leave open which of equal values comes first, and those that do not."""


def called(node: fx.Node, args: Args, kwargs: Kwargs) -> Call:
    """Return the call that a node of an export stands for; by default its operator's."""
    target: Any = node.target
    name, overload = name_of_operator(target)
    if not name:
        return "call_function", getattr(target, "overloadpacket", target), args, kwargs
    if name.rstrip("_") in ("clamp", "clip") and float in map(type, (*args, *kwargs.values())):
        args, kwargs = pytree.tree_map_only(int, float, (args, kwargs))  # torch.onnx takes no 2 beside -0.5
    left_out = empty_by_default(target)  # an export names them where later arguments are given, and functions take None
    args = tuple(
        None if each == [] and key in left_out else each
        for key, each in zip(argument_names(target), args, strict=False)
    )
    given = dict(zip(argument_names(target), args, strict=False)) | kwargs
    kwargs = {key: value for key, value in kwargs.items() if key not in UNSAID}
    if name == "sym_size":
        return "call_method", "size", args, kwargs
    if name in ("slice", "select", "index"):
        return _indexed(node, name, args, kwargs)
    if name in ORDER:  # by name, since the function has another order
        return "call_function", getattr(F, name), tuple(given.get(key) for key in ORDER[name] if key in given), {}
    if "upsample" in name and overload == "vec":
        return _resized(name.rstrip("123d") if not name.endswith("_aa") else name.replace("2d", ""), given)
    if name in PYTHONS and len(args) == (1 if name in ("neg", "bitwise_not") else 2) and not kwargs:
        return "call_function", PYTHONS[name], args, {}
    if name in ("T", "mT", "H", "mH", "numpy_T"):
        return "call_function", getattr, (args[0], name.removeprefix("numpy_")), {}
    if name == "view" and overload != "dtype":  # a tensor may be contiguous in one mode alone
        return "call_method", "reshape", args, {}
    if name in METHODS or (name.endswith("_") and hasattr(torch.Tensor, name)):
        return "call_method", name, args, kwargs
    if name.endswith("_") and hasattr(F, name[:-1]):  # F.silu(x, inplace=True)
        return "call_function", getattr(F, name[:-1]), args, {**kwargs, "inplace": True}
    return _found(name, node, args, kwargs)


def _found(name: str, node: fx.Node, args: Args, kwargs: Kwargs) -> Call:
    if name in RENAMED:
        return "call_function", RENAMED[name], args, kwargs
    if name == "feature_dropout":  # one operator for three functions, told apart by the axes
        return "call_function", {4: F.dropout2d, 5: F.dropout3d}.get(node.meta["val"].dim(), F.dropout1d), args, kwargs
    if name in OF_F:
        return "call_function", getattr(F, name), args, kwargs
    names = argument_names(node.target)
    # Losses have a `reduction`, which is a number for operators and a word for functions.
    for home, prefix in HOMES if "reduction" not in names else ():
        found = getattr(home, name.removeprefix(prefix), None) if name.startswith(prefix) else None
        if callable(found) and _takes(found, names[: len(args)], kwargs):
            return "call_function", found, args, kwargs
    if hasattr(torch.Tensor, name) and "reduction" not in names:
        return "call_method", name, args, kwargs
    return "call_function", node.target, args, kwargs


def _takes(function: Callable[..., object], names: list[str], kwargs: Kwargs) -> bool:
    if not isinstance(function, types.FunctionType):
        return True  # functions in C++ are made from the operators' schemas
    parameters = inspect.signature(function).parameters
    own = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_POSITIONAL]
    return bool(own) and own[1 : len(names)] == names[1:] and kwargs.keys() <= set(own)


def _indexed(node: fx.Node, name: str, args: Args, kwargs: Kwargs) -> Call:
    if name == "select" and "getitem__" not in str(node.meta.get("torch_fn", "")):
        return "call_function", torch.select, args, kwargs
    if name == "index":
        index = tuple(slice(None) if each is None else each for each in args[1])  # None: the whole axis
        return "call_function", operator.getitem, (args[0], index if len(index) > 1 else index[0]), {}
    axis, *bounds = args[1:]
    where = bounds[0] if name == "select" else _part(*bounds)
    return "call_function", operator.getitem, (args[0], (*[slice(None)] * axis, where) if axis else where), {}


def _part(start: object = None, end: object = None, step: object = None) -> slice:
    # A bound may also be a node.
    starts, ends = isinstance(start, int) and start == 0, isinstance(end, int) and end == WHOLE
    return slice(None if starts else start, None if ends else end, step)


def _resized(name: str, given: Kwargs) -> Call:
    options = {"size": given.get("output_size"), "scale_factor": given.get("scale_factors"), "mode": RENAMED[name]}
    options |= {"align_corners": True} if given.get("align_corners") else {}
    options |= {"antialias": True} if name.endswith("_aa") else {}
    return "call_function", F.interpolate, (given["input"],), {k: v for k, v in options.items() if v is not None}
