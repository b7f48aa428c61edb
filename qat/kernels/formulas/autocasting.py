"""What autocast does to a formula that multiplies: it sets the dtype of the result, and nothing inside."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def result_dtype(x: Tensor, default: torch.dtype) -> torch.dtype:
    """Autocast's dtype if it is enabled for x's kind of device, else the default."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else default


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which operands are multiplied in their own dtype."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
