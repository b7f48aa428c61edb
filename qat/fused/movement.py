"""Which nodes move quantized tensors about without changing a value, so that their codes can be moved instead."""

from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.fused.functions.pools import Window, window_of

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""They keep a grid in evaluation; in training they divide by 1 - p, or add."""

RESHAPING = {"flatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze", "unflatten"}
"""Methods, and functions of torch, that move no value off its grid and leave none out."""

RESHAPING_MODULES = (nn.Flatten, nn.Unflatten, nn.Identity)

ASKING = {"dim", "ndimension", "size", "numel", "shape", "ndim", "dtype", "device"}
"""Methods and attributes for which no value is looked at."""


def reshapes(node: fx.Node) -> str | None:
    """The method of tensors that a node calls, None if it is none of `RESHAPING`."""
    if node.op == "call_method" and node.target in RESHAPING:
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    return name if node.op == "call_function" and name in RESHAPING and node.target is getattr(torch, name) else None


def asks_for_shape(node: fx.Node) -> bool:
    """Whether a node looks at no value of its first operand, the only one that is a tensor."""
    if node.target is getattr:
        return node.args[1] in ASKING
    return node.op == "call_method" and node.target in ASKING


def window(node: fx.Node, module: Any) -> Window | None:
    """What a node pools, None if it is no max pool of images."""
    if type(module) is nn.MaxPool2d:
        return window_of(module)
    if node.target in (F.max_pool2d, torch.max_pool2d):
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
        given: dict[str, Any] = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
        with suppress(TypeError):  # numbers that only a run knows, or other arguments
            return window_of(nn.MaxPool2d(**given))
    return None
