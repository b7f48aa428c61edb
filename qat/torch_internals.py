"""All that this library takes from torch's private parts, under clear names.

A private name may change with any release of torch, so no other file uses one. tests/house/test_torch_internals.py
counts them, and says in a sentence what is missing if torch changes or removes one of these.
"""

import importlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.fx.node import _get_qualified_name as name_of
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.nn.modules.batchnorm import _NormBase as BatchOrInstanceNorm
from torch.nn.modules.conv import _ConvNd as AnyConvolution
from torch.nn.modules.module import _has_any_global_hook as all_modules_are_hooked
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

__all__ = [
    "AnyBatchNorm",
    "AnyConvolution",
    "BatchOrInstanceNorm",
    "StopRecomputation",
    "TorchDispatchMode",
    "all_modules_are_hooked",
    "name_of",
    "pytree",
]

Patchable: TypeAlias = tuple[object, str]
"""A module or class of torch, and the name in it that tracing replaces."""

# ---- what watches torch's operations ----


def operations_are_watched() -> bool:
    """Return True if torch.func, forward mode, a mode or a trace sees every operation.

    `torch.device(...)` as a context does not count: it is a mode, but only says where new tensors go.
    """
    return (
        maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or _a_mode_sees_functions()
    )


def _a_mode_sees_functions() -> bool:
    for place in range(torch._C._len_torch_function_stack()):
        if not isinstance(torch._C._get_function_stack_at(place), DeviceContext):
            return True
    return False


def load_dynamo() -> None:
    """Import torch.compile's tracer, which notes which functions are Python's own."""
    importlib.import_module("torch._dynamo")


# ---- products ----


def onednn_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.T of float32 matrices, by oneDNN, if this torch has it."""
    # Without it, an AttributeError or a RuntimeError.
    return cast("Tensor", torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))


def product_of_bytes(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of int8 matrices in int32; CUDA has conditions on their sizes."""
    return torch._int_mm(a, b)  # on CUDA of more than 16 rows, and other sizes that are multiples of 8


NEAREST_EXACT_OPERATORS = torch.ops.aten._upsample_nearest_exact1d, torch.ops.aten._upsample_nearest_exact2d
UNSAFE_VIEW_OPERATOR = torch.ops.aten._unsafe_view
BILINEAR_OPERATOR = torch.ops.aten._trilinear
CUDNN_RECURRENT_OPERATOR = torch.ops.aten._cudnn_rnn
CPU_ATTENTION_OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def writes_to_arguments(operator: torch._ops.OpOverload) -> bool:
    """Return True if an operator works in place or has an `out`."""
    return bool(operator._schema.is_mutable)


def decomposed_operators() -> Any:
    """Return `torch.ops.quantized_decomposed`, whose import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch.ao.quantization.fx._decomposed")
    return torch.ops.quantized_decomposed


# ---- tensors ----


def storage_id(x: Tensor) -> int:
    """Return a number for a tensor's memory, which views share and meta tensors have."""
    return int(x.untyped_storage()._cdata)  # unlike an address, it tells meta tensors apart


def version_of(x: Tensor) -> int:
    """Return how often a tensor was written to in place."""
    return x._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return `version_of` many tensors, quickly."""
    return [*map(attrgetter("_version"), tensors)]


# ---- modules ----


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return torch's live dict of a module's children, shared and None included."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return torch's live dict of a module's own parameters, None included."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return torch's live dict of a module's own buffers, None included."""
    return module._buffers


BUFFERS = "_buffers"
"""Attribute that holds this dict."""


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """Return the live set of names of a module's buffers outside its state dict."""
    return module._non_persistent_buffers_set


FORWARD_HOOKS = "_forward_hooks"
"""Attribute that holds the hooks behind forward."""


def has_forward_hooks(module: nn.Module) -> bool:
    """Return True if a hook waits for this module to be called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return True if a hook waits for gradients of this module's inputs or outputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def hooks_of(module: nn.Module) -> tuple[dict[int, Callable[..., object]], ...]:
    """Return torch's live dicts of a module's forward and backward hooks."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def weight_names_of(module: nn.RNNBase) -> list[list[str]]:
    """Return names of a recurrent layer's weights and biases, by layer and direction."""
    return module._all_weights


def output_padding_of(module: Any, x: Tensor, output_size: list[int] | None) -> list[int]:
    """Return what a transposed convolution adds to one side to get `output_size`."""
    found: list[int] = module._output_padding(
        x, output_size, module.stride, module.padding, module.kernel_size, len(module.kernel_size), module.dilation
    )
    return found


def layer_versions(state: object) -> Any:
    """Return the layers' versions in a state dict, which older weights need, or None."""
    return getattr(state, "_metadata", None)


def set_layer_versions(state: Any, versions: object) -> None:
    """Give a state dict the versions of its layers."""
    state._metadata = versions


def note_in_state(state: object, prefix: str, key: str, value: object) -> None:
    """Write a note beside the version of the module at this prefix of a state dict.

    `_load_from_state_dict` is handed it. A state dict that is no longer torch's own (filtered, or from safetensors)
    holds no notes.
    """
    notes = layer_versions(state)
    if notes is not None:
        notes[prefix.removesuffix(".")][key] = value


# ---- graphs of torch.fx ----

GRAPH_CONSTANT = "_tensor_constant"
"""Beginning of names for tensors that `forward` made while torch.fx traced it."""


def keep_signature(original: fx.Graph, graph: fx.Graph) -> None:
    """Let a graph take and return the containers that the original's caller uses."""
    graph.set_codegen(original._codegen)


def name_of_operator(target: object) -> tuple[str, str]:
    """Return an ATen operator's name and its overload's; nothing for anything else."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return "", ""
    return target._schema.name.removeprefix("aten::"), target._overloadname


def writes_to_first(operator: Any) -> bool:
    """Return True if an operator works in place."""
    arguments = operator._schema.arguments if hasattr(operator, "_schema") else []
    return bool(arguments and arguments[0].alias_info and arguments[0].alias_info.is_write)


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others, in few launches."""
    torch._foreach_copy_(targets, sources)


def shares_first(operator: Any) -> bool:
    """Return True if an operator's result may be the memory of its first argument."""
    returns = operator._schema.returns if hasattr(operator, "_schema") else []
    return bool(returns and returns[0].alias_info)


def fields_of(value: tuple[object, ...]) -> tuple[str, ...]:
    """Return the names in a named tuple; none of any other."""
    return getattr(value, "_fields", ())


def call_by_hand(module: nn.Module) -> Callable[..., Any]:
    """Return what a call of a module runs, whatever the instance has in its place."""
    return partial(type(module)._call_impl, module)


CALLED = "_call_impl"
"""Attribute that a call of a module runs."""


def argument_names(operator: Any) -> list[str]:
    """Return the argument names of an operator of ATen; none for anything else."""
    return [each.name for each in operator._schema.arguments] if hasattr(operator, "_schema") else []


def empty_by_default(operator: Any) -> set[str]:
    """Return the names of an operator's lists that are empty where a call leaves them out."""
    return {each.name for each in operator._schema.arguments if each.default_value == []}


# ---- what torch.export decides about sizes ----

_OPERATORS = "_decomp/", "_library/", "_meta_registrations.py", "_ops.py", "_prims", "_refs/", "_subclasses/"
_OPERATOR_FILES = tuple(str(Path(torch.__file__).parent / part) for part in _OPERATORS)


@contextmanager
def free_sizes() -> Iterator[None]:
    """Export in this context without taking for granted that sizes are not 0 or 1."""
    # No results are kept by shape: to compare shapes that are formulas takes half the time of window models.
    sizes: Any = importlib.import_module("torch.fx.experimental._config")
    tensors: Any = importlib.import_module("torch._dynamo.config")
    with sizes.patch(backed_size_oblivious=True), tensors.patch(fake_tensor_cache_enabled=False):
        yield


def depends_on_values(error: BaseException) -> bool:
    """Return True if an export failed since the way depends on the values of a tensor."""
    # Imported late: it takes as long as torch itself.
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return isinstance(error, shapes.GuardOnDataDependentSymNode)


@contextmanager
def forget_decisions(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Forget in this context what an export decides about sizes of these tensors."""
    shapes = next((x.fake_mode.shape_env for x in tensors if hasattr(x, "fake_mode")), None)
    known = None if shapes is None else (len(shapes.guards), dict(shapes.replacements))
    yield
    if shapes is not None and known is not None and dict(shapes.replacements) == known[1]:
        del shapes.guards[known[0] :]
        shapes._update_version_counter()


def size_conditions(exported: Any, count: int, watching: str) -> list[str]:
    """Return what an export took for granted of sizes `s[number][axis]`, in Python.

    The sizes are those of its inputs, a list of tensors. Left out is what operators decide for themselves when they
    run: how they lay out memory, whether they broadcast. `watching` is the file of a mode that calls them, and so seems
    to be where they decide.
    """
    import sympy  # late, as it takes half a second
    from torch.utils._sympy.printers import PythonPrinter

    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"][-count:]
    conditions: list[str] = []
    shapes = None
    for number, value in enumerate(values):
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            shapes = size.node.shape_env if isinstance(size, torch.SymInt) else shapes
            conditions += [f"s[{number}][{axis}] == {size}"] * (not isinstance(size, torch.SymInt))
    names: dict[Any, Any] = {} if shapes is None else {
        symbol: sympy.Symbol("s[{}][{}]".format(*re.findall(r"\[(\d+)\]", source)))
        for source, symbol in shapes.source_to_var.items()
    }  # fmt: skip
    guards: list[Any] = [] if shapes is None else shapes.guards
    for guard in guards:
        file = str(getattr(guard.sloc.framework_loc, "filename", ""))
        by_operator = file == watching or file.startswith(_OPERATOR_FILES)
        if guard.expr.free_symbols <= names.keys() and (isinstance(guard.expr, sympy.Eq) or not by_operator):
            conditions.append(PythonPrinter().doprint(guard.expr.xreplace(names)))
    return list(dict.fromkeys(conditions))


def size_checker(condition: str) -> Callable[[list[tuple[int, ...] | None]], bool]:
    """Return a condition of `size_conditions` as a function of the shapes."""
    return cast(
        "Callable[[list[tuple[int, ...] | None]], bool]", eval(f"lambda s: {condition}", {"torch": torch, "math": math})
    )


# ---- what tracing replaces ----

CAUSAL_MASK_DETECTION: Patchable = (transformer, "_detect_is_causal_mask")
"""The function by which transformers see if a mask's values happen to be causal."""

CHECKPOINT: Patchable = (checkpoint.CheckpointFunction, "apply")
"""The function of a reentrant checkpoint, which would run under no_grad."""


def applied_function(context: Any) -> type[torch.autograd.Function]:
    """Return the autograd.Function of a context, or of its node in autograd's graph."""
    return cast("type[torch.autograd.Function]", type(context)._forward_cls)


def layout_noting() -> Patchable:
    """Return what an export calls to note the layout of every tensor."""
    return importlib.import_module("torch.fx.experimental.proxy_tensor"), "_extract_tensor_metadata"


def export_printing() -> Patchable:
    """Return the name with which a failing export writes its graph to stderr."""
    return importlib.import_module("torch.export._trace"), "print"
