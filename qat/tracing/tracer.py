"""`QuantTracer`: torch.fx tracing of a float model for preparation."""

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.contexts import evaluating
from qat.layers.twins import float_type_of
from qat.quantizer import Quantizer
from qat.text import first_line
from qat.tracing.attention import multi_head_attention, scaled_dot_product_attention
from qat.tracing.hints import HintTracer

TRANSFORMERS = (
    nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)  # fmt: skip

KEPT_WHOLE = ("StochasticDepth", "FrozenBatchNorm2d")
"""torchvision's modules that stay whole: tracing would fix their mode, and the BatchNorm folds as a module."""

FOREIGN = ("torch", "math", "builtins", "_operator", "operator", "qat")
"""Packages whose functions are operations; the tracer traces into any other function."""


class TupleWithNode(tuple[Any, ...]):
    """A tuple of results with a `node`, since torch.fx marks the node of what a wrapped function returns."""

    node = types.SimpleNamespace(meta={})


class QuantTracer(HintTracer):
    """fx.Tracer whose graphs may pass submodules as arguments: a layer takes its input's quantizer and its BatchNorm.

    So a prepared model can be pickled: GraphModule is rebuilt by tracing its code again. Attention, and functions that
    a library marks as untraceable (`torch.fx.wrap`), are split into their operations.

    Attributes:
        opaque: functions that could not be split, name to reason.
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
        """torch's own modules except attention, modules with a twin, and those that are kept whole."""
        if type(m) in (*TRANSFORMERS, nn.MultiheadAttention):
            return False
        known = type(m).__name__ in KEPT_WHOLE or isinstance(m, Quantizer) or float_type_of(m) is not None
        return known or super().is_leaf_module(m, module_qualified_name) or self._rests_in_evaluation(m)

    def _rests_in_evaluation(self, m: nn.Module) -> bool:
        """Whether a module without state passes its input in evaluation and changes it in training: DropPath.

        Traced into, it would give all that follows other inputs in training, and so a second copy in the graph.
        """
        if self.is_paused or any(True for _ in (*m.children(), *m.parameters(), *m.buffers())):
            return False
        x, self._running = torch.ones(2, 2), True
        try:
            with evaluating(m):
                return m(x) is x and m.train()(x) is not x
        except Exception:  # it takes other inputs
            return False
        finally:
            self._running = False

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace into attention; run the module itself while tracing is paused."""
        if self.is_paused:
            return forward(*args, **kwargs)
        if type(m) is nn.MultiheadAttention:
            forward = functools.partial(multi_head_attention, m)
        return super().call_module(m, forward, args, kwargs)

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> Any:
        """A node; for attention and functions of other packages, the nodes of their operations."""
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
                return TupleWithNode(result)
            if isinstance(result, fx.Proxy):
                return result
            reason = f"it returns a {type(result).__name__}"
        except Exception as error:  # foreign code may raise anything on a proxy
            reason = first_line(error)
        self.opaque[function.__name__] = reason
        for node in reversed([node for node in self.graph.nodes if node not in known]):
            self.graph.erase_node(node)
        return None


def is_foreign(target: Any) -> bool:
    """Whether a function is code of another library or of the user, and no operation of torch or Python."""
    return isinstance(target, types.FunctionType) and target.__module__.partition(".")[0] not in FOREIGN
