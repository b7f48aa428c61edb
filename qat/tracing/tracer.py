"""torch.fx tracing of a float model, with module paths kept so that new modules get telling names."""

import types
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from qat.layers.twins import float_type_of
from qat.tracing.attention import multi_head_attention, scaled_dot_product_attention
from qat.tracing.hints import HintTracer

TRANSFORMERS = (
    nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)  # fmt: skip

KEPT_WHOLE = ("StochasticDepth", "FrozenBatchNorm2d")
"""torchvision's modules that act by train or eval mode, which tracing would bake in, or fold as a BatchNorm does."""

FOREIGN = ("torch", "math", "builtins", "_operator", "operator", "qat")
"""Packages whose functions are operations; any other function is looked into."""


class Several(tuple[Any, ...]):
    """What a function returns that returns several values; torch.fx marks the node of what a wrapped one returns."""

    node = types.SimpleNamespace(meta={})


class QuantTracer(HintTracer):
    """fx.Tracer whose graphs may pass a submodule as an argument: a layer is handed its grid and its BatchNorm.

    That makes a prepared model picklable too, because GraphModule is rebuilt by tracing its code again. Attention and
    functions that a library marks as untraceable (`torch.fx.wrap`) are taken apart into the operations that they do.

    Attributes:
        opaque: functions that could not be taken apart, name to reason.
    """

    def __init__(self, examples: Mapping[str, Any] | None = None) -> None:
        super().__init__(examples)
        self.opaque: dict[str, str] = {}

    def create_arg(self, a: Any) -> Any:
        """A submodule used as an argument becomes a get_attr node."""
        if isinstance(a, nn.Module):
            return self.create_node("get_attr", self.path_of_module(a), (), {})
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """torch's own modules except those that are attention, and modules that only look like several operations."""
        if type(m) in (*TRANSFORMERS, nn.MultiheadAttention):
            return False
        return (
            type(m).__name__ in KEPT_WHOLE
            or float_type_of(m) is not None
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace into attention; run plainly where modules are to act as ever."""
        if self.is_paused:
            return forward(*args, **kwargs)
        if type(m) is nn.MultiheadAttention:
            return super().call_module(m, lambda *a, **k: multi_head_attention(m, *a, **k), args, kwargs)
        return super().call_module(m, forward, args, kwargs)

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> Any:
        """A node; or, for attention and for functions of other packages, the nodes that they are made of."""
        if kind == "call_function" and target is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        if kind == "call_function" and is_foreign(target):
            taken_apart = self._take_apart(target, args, kwargs)
            if taken_apart is not None:
                return taken_apart
        return super().create_proxy(kind, target, args, kwargs, *rest, **named)

    def _take_apart(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function as the nodes of its operations; None if it cannot be traced."""
        known = set(self.graph.nodes)
        try:
            result = function(*args, **kwargs)
            if isinstance(result, (tuple, list)):
                return Several(result)
            if isinstance(result, fx.Proxy):
                return result
            reason = f"it returns a {type(result).__name__}"
        except Exception as error:  # whatever foreign code does with a proxy
            reason = first_line(error)
        self.opaque[function.__name__] = reason
        for node in reversed([node for node in self.graph.nodes if node not in known]):
            self.graph.erase_node(node)
        return None


def is_foreign(target: Any) -> bool:
    """Whether a function is no operation of torch or Python, but code of a library or of the user."""
    return isinstance(target, types.FunctionType) and target.__module__.partition(".")[0] not in FOREIGN


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
