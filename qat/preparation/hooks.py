"""Whether user code runs when a module is called: hooks, patched methods, or a class of the user's own."""

from collections.abc import Callable
from functools import partial

from torch import nn

from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.quantizer.base import CALL_METHODS
from qat.torch_internals import hooks_of

METHODS = (
    "compute", "operate", "quantized", "_conv_forward", "channels_first", "torch_layout", "_check_input_dim",
    *CALL_METHODS,
)  # fmt: skip
"""Methods of the known classes that run when a module is called, and that a user could patch."""

_NAMES = frozenset(METHODS)


def is_watched(module: nn.Module) -> bool:
    """Whether the module has hooks, or a method that is patched on the instance."""
    return any(hooks_of(module)) or not _NAMES.isdisjoint(vars(module))


def watch(module: nn.Module) -> list[Callable[[], object]]:
    """What `is_watched` looks at, as calls: if it changes, so does one of their results."""
    return [*(hooks.__len__ for hooks in hooks_of(module)), partial(_NAMES.isdisjoint, vars(module))]


def may_write(module: nn.Module | None) -> bool:
    """Whether a module may write into its inputs: it is of an unknown class, or it is watched.

    torch's own modules write only if they are told to (`inplace`).
    """
    if module is None:
        return False
    known = isinstance(module, (QuantLayer, Quantizer)) or type(module).__module__.startswith("torch.nn.modules.")
    return not known or is_watched(module)
