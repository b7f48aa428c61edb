"""`QuantTracer`: torch.fx tracing of a float model for preparation, which can trace decisions on sizes.

A plain torch.fx proxy cannot decide `if H % window: x = F.pad(x, ...)`. A proxy that carries the value of the example
inputs can: the trace takes that branch. A guard in the graph later refuses inputs of another size, for which the graph
would not compute what the float model does.
"""

import functools
import inspect
import operator
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.proxy import Attribute, TraceError

from qat.contexts import evaluating
from qat.inputs import copied
from qat.layers.twins import float_type_of
from qat.quantizer import Quantizer
from qat.text import first_line
from qat.torch_internals import pytree, trace_in_this_thread_only
from qat.tracing.attention import multi_head_attention, scaled_dot_product_attention
from qat.tracing.in_place import written_by
from qat.tracing.nodes import FACTS, Facts, attribute
from qat.tracing.patches import tracing_alone
from qat.tracing.proxies import HintProxy, expect_default, expect_same

TRANSFORMERS = (
    nn.Transformer, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)  # fmt: skip

KEPT_WHOLE = ("StochasticDepth", "FrozenBatchNorm2d", "SyncBatchNorm", "CUDASyncBatchNorm")
"""Modules that stay whole: tracing would fix the mode of torchvision's first, and the BatchNorms fold as modules."""

FOREIGN = ("torch", "math", "builtins", "_operator", "operator", "qat")
"""Packages whose functions are operations; the tracer traces into any other function."""


class TupleWithNode(tuple[Any, ...]):
    """A tuple of results with a `node`, since torch.fx marks the node of what a wrapped function returns."""

    node = types.SimpleNamespace(meta={})


OF_SHAPES = frozenset((
    "getattr", "getitem", "len", "size", "dim", "ndimension", "numel", "nelement", "stride", "get_device",
    "element_size", "type", "is_contiguous", "is_floating_point", "is_complex", "is_tensor",
))  # fmt: skip
"""Functions and methods whose result depends only on the shape and type of a tensor, not on its values."""


def _holds_tensors(kept: Any) -> bool:
    return any(isinstance(leaf, weakref.ref) for leaf in pytree.tree_leaves(kept))


def _context() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled()


class QuantTracer(fx.Tracer):
    """fx.Tracer that also runs every node on the example inputs, if there are any.

    Its graphs may pass submodules as arguments: a layer takes its input's quantizer and its BatchNorm. So a prepared
    model can be pickled: GraphModule is rebuilt by tracing its code again. Attention, and functions that a library
    marks as untraceable (`torch.fx.wrap`), are split into their operations.
    """

    def __init__(self, examples: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self.examples = examples  # argument name to value; None traces without
        self.opaque: dict[str, str] = {}  # functions that could not be split, name to reason
        self._kept: dict[fx.Node, Any] = {}  # values, tensors as weak references: proxies hold them while forward does
        self._result: Any = None  # what forward returned, whose tensors `answer` gives
        self._guarded: set[fx.Node] = set()
        self._running = False
        self._modes = _context()
        self._thread = threading.get_ident()

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        """Trace while no other thread does, since torch.fx patches nn.Module."""
        with tracing_alone:
            self._thread = threading.get_ident()
            return super().trace(root, concrete_args)

    @property
    def is_paused(self) -> bool:
        """Whether modules run normally: one runs on the example inputs, or another thread calls its own model."""
        return self._running or threading.get_ident() != self._thread

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A proxy for a node, with a hint where there are example inputs."""
        if self.examples is None:
            return super().proxy(node)
        try:
            value = self._value_of(node)
        except BaseException:
            self.graph.erase_node(node)  # whoever catches the error takes another branch
            raise
        node.meta[FACTS] = Facts.of(value)
        return HintProxy(node, self, value)

    def create_arg(self, a: Any) -> Any:
        """A proxy becomes its node, a submodule a get_attr node, and a NumPy scalar a Python number."""
        if isinstance(a, nn.Module):
            return self.create_node("get_attr", self.path_of_module(a), (), {})
        if isinstance(a, np.generic):
            a = a.item()
        return a.node if isinstance(a, fx.Proxy) else super().create_arg(a)

    def create_proxy(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any, **named: Any
    ) -> Any:
        """A node. After an in-place change, a tensor's proxy stands for the result of the change.

        So the graph reads as if nothing were written in place: a residual that is added after an in-place `relu(x)` is
        the ReLU's result. Attention and functions of other packages become the nodes of their operations.
        """
        if kind == "call_function" and target is F.scaled_dot_product_attention:
            return scaled_dot_product_attention(*args, **kwargs)
        if kind == "call_function" and is_foreign(target):
            taken_apart = self._take_apart(target, args, kwargs)
            if taken_apart is not None:
                return taken_apart
        if self._modes != _context():
            raise TraceError("a part of it runs under no_grad or autocast, which a graph does not keep")
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        changed: Any = kwargs.get("out", args[0] if args else kwargs.get("input"))
        has_name = isinstance(changed, fx.Proxy) and not isinstance(changed, Attribute)
        if has_name and target is not operator.setitem and written_by(proxy.node, self.root) is changed.node:
            changed.node = proxy.node
        return proxy

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

    def guard(self, proxy: Any) -> Any:
        """The proxy's value for the example inputs, if sizes alone decide it; a guard in the graph refuses others."""
        value = proxy.hint
        if self._follows_values(proxy.node):
            raise TraceError("the way through the model depends on the values of a tensor")
        if proxy.node not in self._guarded:
            self._guarded.add(proxy.node)
            where = next(reversed(self.module_stack.values()))[0] if self.module_stack else "the model"
            self.create_proxy("call_function", expect_same, (proxy, value, where or "the model"), {})
        return value

    def _follows_values(self, node: fx.Node) -> bool:
        """Whether a node is a tensor, or was computed from the values of one, as by `item()` or `tolist()`."""
        if isinstance(self._stored(node), weakref.ref):
            return True
        if _holds_tensors(self._stored(node)):
            return False
        asks_shape = getattr(node.target, "__name__", node.target) in OF_SHAPES
        return any(
            not asks_shape if _holds_tensors(self._stored(source)) else self._follows_values(source)
            for source in node.all_input_nodes
        )

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Placeholders. An argument with a default and without an example is fixed at its default, with a guard."""
        trace_in_this_thread_only()
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        parameters = list(inspect.signature(root_fn).parameters.values())[int(is_module) :]
        known = self.examples or {}
        for position, parameter in enumerate(parameters, start=int(is_module)):
            plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if plain and parameter.default is not parameter.empty and parameter.name not in known:
                argument = (args[position], parameter.default, parameter.name)
                self.create_proxy("call_function", expect_default, argument, {})
                args[position] = parameter.default

        def recorded(*given: Any) -> Any:
            self._result = function(*given)
            return self._result

        return recorded, args

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide as the example inputs do."""
        if self.examples is None:
            return super().to_bool(obj)
        hint = getattr(obj, "hint", None)
        if isinstance(hint, Sized) and not isinstance(hint, torch.Tensor):
            return len(obj) > 0
        return bool(self.guard(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Iterate over as many items as the example value has."""
        if self.examples is None:
            return super().iter(obj)
        items: Any = obj
        if isinstance(items.hint, Mapping):
            return iter(list(items.hint))
        return iter([items[number] for number in range(len(items))])

    def keys(self, obj: fx.Proxy) -> Any:
        """The keys of a mapping, for `**obj`."""
        hint = getattr(obj, "hint", None)
        return list(hint) if isinstance(hint, Mapping) else super().keys(obj)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Parameters and buffers become nodes, except while tracing is paused."""
        return attr_val if self.is_paused else super().getattr(attr, attr_val, parameter_proxy_cache)

    def answer(self, graph: fx.Graph) -> Any:
        """The traced graph's output for the example inputs."""
        return fx.node.map_arg(graph.output_node().args[0], self._known)

    def replay(self, graph: fx.Graph) -> Any:
        """The graph's output when every node runs again."""
        last = {source: node for node in graph.nodes for source in node.all_input_nodes}
        held = {}
        for node in graph.nodes:
            held[node] = self._value_of(node)
            if node.op != "output":
                for source in node.all_input_nodes:
                    if last[source] is node:
                        del held[source]
        return self.answer(graph)

    def _value_of(self, node: fx.Node) -> Any:
        assert self.examples is not None
        if node.op == "output":
            return None
        if node.op == "placeholder":
            value = self.examples.get(str(node.target).lstrip("*"), node.args[0] if node.args else None)
            value = copied(value)
        else:
            running, self._running = self._running, True  # one value may ask for another
            try:
                with torch.no_grad():
                    value = self._run(node)
            finally:
                self._running = running
        self._kept[node] = pytree.tree_map(lambda x: weakref.ref(x) if isinstance(x, torch.Tensor) else x, value)
        return value

    def _stored(self, node: fx.Node) -> Any:
        if node not in self._kept:  # a constant or a named tuple, whose node never had a proxy
            self._value_of(node)
        return self._kept[node]

    def _known(self, node: fx.Node) -> Any:
        if any(isinstance(x, weakref.ref) and x() is None for x in pytree.tree_leaves(self._stored(node))):
            return self._value_of(node)  # of an attribute such as x.mT, which proxies make anew
        return pytree.tree_map(lambda x: x() if isinstance(x, weakref.ref) else x, self._kept[node])

    def _run(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return attribute(self.root, str(node.target))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._known)
        if node.op == "call_function":
            return None if node.target in (expect_same, expect_default) else node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        module = self.root.get_submodule(str(node.target))
        with evaluating(module):
            return module(*args, **kwargs)


def is_foreign(target: Any) -> bool:
    """Whether a function is code of another library or of the user, and no operation of torch or Python."""
    return isinstance(target, types.FunctionType) and target.__module__.partition(".")[0] not in FOREIGN
