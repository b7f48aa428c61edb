"""The activations that kernels compute together with the quantizer behind them: all that qat.fused knows of each."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class FusedActivation:
    """A row of the table: a clip or a curve.

    Attributes:
        modules: torch's classes for it.
        functions: torch's functions of one tensor for it, and names of methods.
        bounds: floor and ceiling of a clip; None if it is a curve.
        module_bounds: attributes of the modules that hold other bounds.
        curve: the kernels' name of a curve; None if it is a clip.
        options: what other arguments, or attributes of the modules, have to be.
    """

    modules: tuple[type[nn.Module], ...]
    functions: tuple[Any, ...] = ()
    bounds: tuple[float, float] | None = None
    module_bounds: tuple[str, ...] = ()
    curve: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def read(self) -> tuple[str, ...]:
        """Attributes of the modules that a fused graph is derived from."""
        own = ("inplace",) if "inplace" in inspect.signature(self.modules[0]).parameters else ()
        return (*own, *self.module_bounds, *self.options)


ACTIVATIONS = (
    FusedActivation((nn.ReLU,), (F.relu, torch.relu, F.relu_, "relu", "relu_"), bounds=(0.0, math.inf)),
    FusedActivation((nn.ReLU6,), (F.relu6,), bounds=(0.0, 6.0), module_bounds=("min_val", "max_val")),
    FusedActivation((nn.Hardtanh,), bounds=(-1.0, 1.0), module_bounds=("min_val", "max_val")),
    FusedActivation((nn.SiLU,), (F.silu,), curve="silu"),
    FusedActivation((nn.Hardswish,), (F.hardswish,), curve="hardswish"),
    FusedActivation((nn.GELU,), (F.gelu,), curve="gelu", options={"approximate": "none"}),
    FusedActivation((nn.GELU,), (F.gelu,), curve="gelu_tanh", options={"approximate": "tanh"}),
)

DEFAULTS = {"approximate": "none"}
"""What torch's functions take if an option is not given."""

READ: dict[type[nn.Module], tuple[str, ...]] = {kind: row.read for row in ACTIVATIONS for kind in row.modules}
"""Attributes that a fused graph is derived from, by class."""

PLAIN_CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    row.curve: functools.partial(row.functions[0], **row.options) for row in ACTIVATIONS if row.curve is not None
}
"""torch's functions by the kernels' names of the curves."""


def row_of(computes: Any, options: Mapping[str, Any]) -> FusedActivation | None:
    """The row of a class of modules, a function, or a method's name; None if kernels compute none such.

    Args:
        computes: the class, the function, or the name.
        options: attributes or arguments besides the tensor.
    """
    for row in ACTIVATIONS:
        if computes in row.modules or computes in row.functions:
            given = {**DEFAULTS, **options}
            if all(given[name] == value for name, value in row.options.items()):
                return row
    return None
