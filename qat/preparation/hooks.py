"""Who waits for a module to be called: hooks, a `forward` that somebody put on it, a class that somebody wrote."""

from torch import nn

from qat.layers import QuantLayer
from qat.quantizer import Quantizer

METHODS = (
    "forward", "compute", "operate", "quantized", "_conv_forward", "channels_first", "torch_layout", "quantize", "grid",
    "effective_scale", "positive", "bounds", "gradient_factor", "repair", "follow", "_check_input_dim",
)  # fmt: skip
"""What the known classes do when they are called, as far as a user could replace it."""

_NAMES = frozenset(METHODS)


def is_watched(module: nn.Module) -> bool:
    """Whether a hook waits for this module to be called, or its own `forward` is not that of its class."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ) or not _NAMES.isdisjoint(vars(module))


def may_write(module: nn.Module | None) -> bool:
    """Whether a module may write into what it is given: one that somebody put there, or who hooks into its call.

    torch's own do only where they are told to (`inplace`).
    """
    if module is None:
        return False
    known = isinstance(module, (QuantLayer, Quantizer)) or type(module).__module__.startswith("torch.nn.modules.")
    return not known or is_watched(module)
