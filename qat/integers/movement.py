"""Nodes that move quantized tensors without changing a value."""

from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.graph.operations import DROPOUTS, calls_of, calls_where

RESTING = ("StochasticDepth", "DropPath")
"""Classes that pass their input in evaluation: torchvision's, timm's, and copies."""

RESHAPING = calls_where(lambda row: row.keeps_all)
ASKING = calls_of("question").methods


class Window(NamedTuple):
    """The sizes of a max pool, each for height and width."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    ceil_mode: bool

    def packed(self) -> list[int]:
        """Return all numbers in one list, for an operator."""
        return [*self.kernel, *self.stride, *self.padding, *self.dilation, int(self.ceil_mode)]


def rests(module: nn.Module | None) -> bool:
    """Return True if a module in evaluation mode passes its input."""
    if type(module).__name__ in RESTING and module is not None:
        x = torch.ones(2, 2)
        with suppress(Exception):  # a class of that name that takes other inputs
            return module.forward(x) is x
    return isinstance(module, DROPOUTS.modules)


def reshapes(node: fx.Node) -> str | None:
    """Return the method by which a node keeps every value as it is, or None."""
    if node.op == "call_method" and node.target in RESHAPING.methods:
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    return name if node.op == "call_function" and node.target in RESHAPING.functions else None


def asks_for_shape(node: fx.Node) -> bool:
    """Return True if a node only asks for metadata (shape, dtype, device)."""
    if node.target is getattr:
        return node.args[1] in ASKING
    return node.target is len or (node.op == "call_method" and node.target in ASKING)


def window(node: fx.Node, module: nn.Module | None) -> Window | None:
    """Return the sizes of a max pool of images, or None for any other node."""
    if type(module) is nn.MaxPool2d:
        return window_of(module)
    if node.target in (F.max_pool2d, torch.max_pool2d) and len(node.all_input_nodes) == 1:  # sizes are known
        names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
        given: dict[str, Any] = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
        with suppress(TypeError):  # other arguments
            return window_of(nn.MaxPool2d(**given))
    return None


def window_of(pool: nn.MaxPool2d) -> Window | None:
    """Return the sizes of an nn.MaxPool2d, or None if it returns indices too."""
    if pool.return_indices:
        return None
    stride = pool.kernel_size if pool.stride is None else pool.stride
    sizes = (pool.kernel_size, stride, pool.padding, pool.dilation)
    pairs = [[size, size] if isinstance(size, int) else list(size) for size in sizes]
    return Window(pairs[0], pairs[1], pairs[2], pairs[3], pool.ceil_mode)
