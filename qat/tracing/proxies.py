"""Proxies that know the value of their node for the example inputs, and guards: nodes that refuse other values."""

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import has_side_effect
from torch.fx.proxy import Attribute, TraceError

GRADIENTS = frozenset((
    "requires_grad", "requires_grad_", "is_leaf", "grad", "grad_fn", "backward", "retain_grad", "retains_grad",
    "register_hook", "register_post_accumulate_grad_hook", "is_inference", "_backward_hooks", "_version",
))  # fmt: skip
"""Attributes and methods of a tensor that concern its gradients. A graph keeps none of them."""


class HintedValue:
    """What knows its value for the example inputs, and adds a guard for that value where Python asks for it."""

    node: fx.Node
    tracer: Any
    hint: Any

    def __len__(self) -> int:
        return int(self.tracer.guard(self.tracer.create_proxy("call_function", len, (self,), {})))

    def __index__(self) -> int:
        return int(self.tracer.guard(self))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.tracer.guard(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """For NumPy functions of sizes."""
        return np.asarray(self.tracer.guard(self), dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self.hint, name):
            raise AttributeError(f"{type(self.hint).__name__!r} object has no attribute {name!r}")
        if name in GRADIENTS and isinstance(self.hint, torch.Tensor):
            raise TraceError(f"forward asks a tensor for {name}, which a graph does not keep")
        proxy: Any = self
        return HintAttribute(proxy, name)


class HintProxy(HintedValue, fx.Proxy):
    """A proxy with the value of its node for the example inputs."""

    def __init__(self, node: fx.Node, tracer: Any, hint: Any) -> None:
        self.hint = hint
        super().__init__(node, tracer)


class HintAttribute(HintedValue, Attribute):
    """`x.shape` or `x.view`; it becomes a node only when it is used as a value."""

    @property
    def hint(self) -> Any:
        """The attribute's value for the example inputs."""
        return getattr(self.root.hint, self.attr)  # it exists: the root's __getattr__ checked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A method call. The views of a mapping are expanded now, since a graph cannot index them."""
        if isinstance(self.root.hint, Mapping) and self.attr in ("keys", "values", "items", "get"):
            return getattr({key: self.root[key] for key in self.root.hint}, self.attr)(*args, **kwargs)
        return super().__call__(*args, **kwargs)


@has_side_effect
def expect_same(value: Any, expected: Any, where: str) -> None:
    """Raise a ValueError if a value differs from its value for the example inputs."""
    if isinstance(value, fx.Proxy):  # unpickling traces the code again
        value.tracer.create_proxy("call_function", expect_same, (value, expected, where), {})
    elif value != expected:
        raise ValueError(
            f"{where}: a size that decides the way through the model is {value!r}, and it was {expected!r} for the"
            " example_inputs of prepare; prepare the model again with inputs of this size"
        )


@has_side_effect
def expect_default(value: Any, default: Any, name: str) -> None:
    """Raise a ValueError if an argument of forward is not its default, for which the model was prepared."""
    if isinstance(value, fx.Proxy):
        value.tracer.create_proxy("call_function", expect_default, (value, default, name), {})
    elif value is not default and (isinstance(value, torch.Tensor) or value != default):
        raise ValueError(
            f"the model was prepared for its argument {name!r} being {default!r}; to use another, prepare it with"
            " example_inputs that contain one"
        )
