"""Everything that this library takes from torch's private parts, each under a name that says what it is for.

A private name may change with any release of torch, so no other file uses one. tests/house/test_torch_internals.py
counts them, and says in a sentence what is missing if torch changes or removes one of these.
"""

import importlib
import threading
import warnings
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import maybe_current_level
from torch._functorch import utils as functorch_utils
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as symbolic_trace
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

__all__ = [
    "AnyBatchNorm",
    "AnyConvolution",
    "BatchOrInstanceNorm",
    "TorchDispatchMode",
    "all_modules_are_hooked",
    "name_of",
    "pytree",
]

Patchable = tuple[Any, str]
"""A module or class of torch, and the name in it that tracing replaces."""

# ---- what watches torch's operations ----


def operations_are_watched() -> bool:
    """Whether something other than autograd sees every operation: torch.func, forward mode, a mode, a trace.

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
    """Import torch.compile's tracer, which notes at its import which functions are Python's own."""
    importlib.import_module("torch._dynamo")


# ---- products ----


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two int8 matrices, in int32."""
    return torch._int_mm(a, b)


def onednn_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T of two float32 matrices, by oneDNN; an AttributeError or RuntimeError if this torch lacks it."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return y


NEAREST_EXACT_OPERATORS = torch.ops.aten._upsample_nearest_exact1d, torch.ops.aten._upsample_nearest_exact2d
UNSAFE_VIEW_OPERATOR = torch.ops.aten._unsafe_view
BILINEAR_OPERATOR = torch.ops.aten._trilinear
CUDNN_RECURRENT_OPERATOR = torch.ops.aten._cudnn_rnn
CPU_ATTENTION_OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def writes_to_arguments(operator: Any) -> bool:
    """Whether an operator (an overload, as a TorchDispatchMode sees it) works in place or has an `out`."""
    return bool(operator._schema.is_mutable)


def decomposed_operators() -> Any:
    """`torch.ops.quantized_decomposed`, which an import defines, with a warning of torch's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch.ao.quantization.fx._decomposed")
    return torch.ops.quantized_decomposed


# ---- tensors ----


def storage_id(x: Tensor) -> int:
    """A number for the memory that a tensor looks at: views share it, and unlike an address it tells meta tensors
    apart."""
    return int(x.untyped_storage()._cdata)


def version_of(x: Tensor) -> int:
    """How often a tensor was written to in place."""
    return x._version


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """`version_of` many tensors, quickly."""
    return [*map(attrgetter("_version"), tensors)]


# ---- modules ----


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The dict in which torch keeps a module's children: live, shared ones under each of their names, None included."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict in which torch keeps a module's own parameters: live, None included."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which torch keeps a module's own buffers: live, None included."""
    return module._buffers


BUFFERS = "_buffers"
"""The attribute that holds this dict."""


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that are not part of its state dict: live."""
    return module._non_persistent_buffers_set


FORWARD_HOOKS = "_forward_hooks"
"""The attribute that holds those for behind forward."""

ASSERTION = torch._assert
"""What a traced `assert` calls."""


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a hook waits for this module to be called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a hook waits for the gradients of this module's inputs or outputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The dicts in which torch keeps a module's forward and backward hooks: live."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def weight_names_of(module: nn.RNNBase) -> list[list[str]]:
    """The names of a recurrent layer's weights and biases, a list for every layer and direction."""
    return module._all_weights


def output_padding_of(module: Any, x: Tensor, output_size: list[int] | None) -> list[int]:
    """What a transposed convolution adds to one side of its result, to get the size that its caller asks for."""
    found: list[int] = module._output_padding(
        x, output_size, module.stride, module.padding, module.kernel_size, len(module.kernel_size), module.dilation
    )
    return found


def layer_versions(state: Any) -> Any:
    """The layers' versions in a state dict, by which they understand weights of older versions; None without any."""
    return getattr(state, "_metadata", None)


def set_layer_versions(state: Any, versions: Any) -> None:
    """Give a state dict the versions of its layers."""
    state._metadata = versions


def note_in_state(state: Any, prefix: str, key: str, value: Any) -> None:
    """Write a note about the module at this prefix beside its version, where `_load_from_state_dict` is handed it.

    A state dict that is no longer torch's own (filtered, or from safetensors) holds no notes.
    """
    notes = layer_versions(state)
    if notes is not None:
        notes[prefix.removesuffix(".")][key] = value


# ---- graphs of torch.fx ----

GRAPH_CONSTANT = "_tensor_constant"
"""The beginning of the names under which torch.fx keeps tensors that `forward` made while it was traced."""


def keep_signature(original: fx.Graph, graph: fx.Graph) -> None:
    """Let a graph take its inputs and return its outputs in the containers that the original's caller uses."""
    graph.set_codegen(original._codegen)


def argument_names(operator: Any) -> list[str]:
    """The names of the arguments of an operator of ATen; none for anything else."""
    return [each.name for each in operator._schema.arguments] if hasattr(operator, "_schema") else []


class _InThisThread:
    """True for the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread


def trace_in_this_thread_only() -> None:
    """While torch.fx traces: let torch 2.11's flag for it, by which compiled code raises, be up in this thread only."""
    if hasattr(symbolic_trace, "_is_fx_tracing_flag"):  # later versions have a flag for each thread
        symbolic_trace._is_fx_tracing_flag = _InThisThread()


# ---- what tracing replaces ----

CAUSAL_MASK_DETECTION: Patchable = (transformer, "_detect_is_causal_mask")
"""Where transformers look whether a mask's values happen to be causal."""

CHECKPOINT_START: Patchable = (checkpoint, "_infer_device_type")
"""What every checkpoint of activations calls first."""

ARGUMENT_UNWRAPPING: Patchable | None = (
    (functorch_utils, "unwrap_if_dead") if hasattr(functorch_utils, "unwrap_if_dead") else None
)
"""Where torch 2.11 hands the arguments of an autograd.Function to C++; later versions have no such place."""


def applied_function(context: Any) -> type[torch.autograd.Function]:
    """The autograd.Function of a context, or of the node that it becomes in autograd's graph."""
    return cast("type[torch.autograd.Function]", type(context)._forward_cls)
