"""Sequentials, lists and dicts of the float model are indexed, counted and iterated in its prepared copy."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat


class Net(nn.Module):
    """Called out of order, with a child that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 3)))
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Dropout(), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"act": nn.ReLU()})
        self.depth = 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.named["act"](self.body(x)).mean((2, 3))
        return self.heads[0](self.heads[2](x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "copied", [lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_the_children_are_those_of_the_float_model_in_its_order(copied: Callable[[nn.Module], Any]) -> None:
    model = copied(qat.prepare(Net(), example_inputs=torch.randn(2, 3, 8, 8)))
    kinds = [type(each).__name__ for each in model.body]
    assert kinds[:3] == ["QuantConv2d", "BatchNorm2d", "ReLU"] and len(model.body) == 4
    assert model.body[3][0] is model.body[-1][0] is model.get_submodule("body.3.0")
    assert [type(each).__name__ for each in model.heads] == ["QuantLinear", "Dropout", "QuantLinear"]
    assert model.heads[1:] == [model.heads[1], model.heads[2]] and model.named["act"] is model.get_submodule(
        "named.act"
    )
    assert model.body and model.depth == 1


def test_a_sequential_itself_and_what_is_none() -> None:
    model: Any = qat.prepare(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert [type(each).__name__ for each in model] == ["QuantLinear", "ReLU", "QuantLinear"] and len(model) == 3
    other: Any = qat.prepare(Net(), example_inputs=torch.randn(2, 3, 8, 8))
    assert other
    for ask in (len, list, lambda net: net[0]):
        with pytest.raises(TypeError, match=r"^'Net' was no Sequential, list or dict before it was prepared$"):
            ask(other)


def test_a_block_is_not_called_by_itself() -> None:
    """Its layers would compute without the grids of their inputs."""
    model: Any = qat.prepare(Net(), example_inputs=torch.randn(2, 3, 8, 8))
    with pytest.raises(NotImplementedError):
        model.body(torch.randn(2, 3, 8, 8))
