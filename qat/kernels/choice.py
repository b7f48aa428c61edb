"""Which kernels a tensor gets: compiled ones on the CPU, Triton's on CUDA, or none, which means the plain formula."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from qat.kernels import cpu, triton
from qat.kernels.switches import plain_wanted

Kernels = type[cpu.CPUKernels] | type[triton.TritonKernels]
"""The fake-quantizer of one device: `quantize` and `gradients`, what `qat.functional` calls instead of its formula."""


def plain_here() -> bool:
    """Whether only plain operations will do: asked for, or something other than autograd looks at every operation."""
    return (
        torch.compiler.is_compiling()
        or plain_wanted()
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or _something_watches_functions()
        or torch._C._get_tracing_state() is not None
    )


def _something_watches_functions() -> bool:
    """Whether a mode sees every function of torch, other than `torch.device(...)`, which only says where tensors go."""
    for place in range(torch._C._len_torch_function_stack()):
        if not isinstance(torch._C._get_function_stack_at(place), DeviceContext):
            return True
    return False


def choose(x: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Kernels | None:
    """The kernels for a tensor and its grid; None where the plain formula has to do.

    Args:
        x: what is to be quantized.
        scale: () or broadcastable to x.
        zero_point: as scale, or None for a symmetric grid.
    """
    if plain_here():
        return None
    if x.device.type == "cpu":
        return cpu.CPUKernels if cpu.applies(x, scale, zero_point) else None
    return triton.TritonKernels if x.device.type == "cuda" and triton.applies(x, scale, zero_point) else None
