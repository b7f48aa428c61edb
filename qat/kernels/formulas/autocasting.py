"""What autocast means to a formula that multiplies: the dtype of its result, and nothing inside."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def result_dtype(x: Tensor, default: torch.dtype) -> torch.dtype:
    """Autocast's dtype where it is enabled for x's kind of device, else the default."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else default


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which operands are multiplied in the dtype that they have."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
