"""The table of fused activations: every row is what torch computes, and every curve is one of the kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.codes.training.activations import PLAIN_CURVES, Activation, activation_of
from qat.graph.operations import TABLE, Row
from tests.references.prepared_case import Plain


def found(module: Callable[[Tensor], Tensor]) -> Activation | None:
    """Of what stands in a graph behind an addition."""
    graph = fx.symbolic_trace(Plain(lambda self, x: self.act(x + 1), act=module))
    return activation_of(list(graph.graph.nodes)[-2], graph)


def calling(row: Row, function: Any) -> Callable[[Tensor], Tensor]:
    """A function or a method, which torch.fx looks into."""
    if isinstance(function, str):
        return lambda x: getattr(x, function)()
    return lambda x: function(x, **dict(row.options))


ACTIVATIONS = [row for row in TABLE if row.bounds or row.fused]
CALLS = [
    (row, calling(row, function), str(getattr(function, "__name__", function)))
    for row in ACTIVATIONS
    for function in row.functions
]
CALLS += [(row, kind(**row.options), kind.__name__) for row in ACTIVATIONS for kind in row.modules]


@pytest.mark.parametrize(("row", "module"), [call[:2] for call in CALLS], ids=[name for *_, name in CALLS])
def test_every_function_and_module_is_found_with_its_bounds_or_its_curve(row: Row, module: Any) -> None:
    activation = found(module)
    assert activation is not None
    assert (activation.curve, activation.bounds) == (row.fused, row.bounds or (-torch.inf, torch.inf))
    assert not isinstance(module, nn.Module) or all(hasattr(module, name) for name in row.reads or ())
    x = torch.linspace(-9, 9, 101)
    ours = x.clamp(*row.bounds) if row.bounds is not None else PLAIN_CURVES[str(row.fused)](x)
    torch.testing.assert_close(ours, module(x.clone()))


def test_bounds_and_options_of_a_module_count_and_other_arguments() -> None:
    clipped, curved = found(nn.Hardtanh(-2, 3)), found(nn.GELU("tanh"))
    assert clipped is not None and clipped.bounds == (-2.0, 3.0)
    assert curved is not None and curved.curve == "gelu_tanh"
    assert found(nn.Tanh()) is None and found(lambda x: F.hardtanh(x, -2.0, 2.0)) is None
