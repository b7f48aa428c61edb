"""The table of fused activations: every row is what torch computes, and every curve is one of the kernels."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.codes.training.activations import ACTIVATIONS, PLAIN_CURVES, Activation, FusedActivation, activation_of


def found(module: nn.Module) -> Activation | None:
    """What stands in a graph of this module behind an addition."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = module

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x + 1)  # type: ignore[no-any-return]

    graph = fx.symbolic_trace(Model())
    return activation_of(list(graph.graph.nodes)[-2], graph)


class Calls(nn.Module):
    """A function or a method as a module, which torch.fx looks into."""

    def __init__(self, row: FusedActivation, function: object) -> None:
        super().__init__()
        self.function, self.options = function, dict(row.options)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.function, str):
            return getattr(x, self.function)()  # type: ignore[no-any-return]
        return self.function(x, **self.options)  # type: ignore[operator, no-any-return]


CALLS = [
    (row, Calls(row, function), str(getattr(function, "__name__", function)))
    for row in ACTIVATIONS
    for function in row.functions
]
CALLS += [(row, kind(**row.options), kind.__name__) for row in ACTIVATIONS for kind in row.modules]


@pytest.mark.parametrize(("row", "module"), [call[:2] for call in CALLS], ids=[name for *_, name in CALLS])
def test_every_function_and_module_is_found_with_its_bounds_or_its_curve(row: FusedActivation, module: Any) -> None:
    activation = found(module)
    assert activation is not None
    assert (activation.curve, activation.bounds) == (row.curve, row.bounds or (-torch.inf, torch.inf))
    assert isinstance(module, Calls) or all(hasattr(module, name) for name in row.read)
    x = torch.linspace(-9, 9, 101)
    ours = x.clamp(*row.bounds) if row.bounds is not None else PLAIN_CURVES[str(row.curve)](x)
    torch.testing.assert_close(ours, module(x.clone()))


def test_bounds_and_options_of_a_module_count() -> None:
    clipped, curved, other = found(nn.Hardtanh(-2, 3)), found(nn.GELU("tanh")), found(nn.Tanh())
    assert clipped is not None and clipped.bounds == (-2.0, 3.0)
    assert curved is not None and curved.curve == "gelu_tanh"
    assert other is None


def test_a_function_with_other_arguments_is_none_of_them() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.hardtanh(x + 1, -2.0, 2.0)

    assert found(Model()) is None
