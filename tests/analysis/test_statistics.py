"""`quantizer_statistics` and `layer_errors` against NumPy in float64, and on models that are hard to look into."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qat
from qat.analysis.errors import layer_errors
from qat.analysis.statistics import learned_statistics, quantizer_statistics
from qat.quantizer import Quantizer


def decibels(x: Any, y: Any) -> float:
    x, y = np.float64(x), np.float64(y)
    return float(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()))


def by_hand(x: torch.Tensor, quantizer: Quantizer) -> dict[str, float]:
    """The statistics of a tensor by the formula of the docstring."""
    scale, zero_point = (np.float64(each.detach().numpy()) for each in quantizer.grid())
    qmin, qmax = quantizer.spec.qmin, quantizer.spec.qmax
    steps = np.float64(x.detach().numpy()) / scale
    integers, steps = np.rint(steps) + zero_point, steps + zero_point
    y = (integers.clip(qmin, qmax) - zero_point) * scale
    return {
        "sqnr": decibels(x.detach().numpy(), y),
        "clipped_low": float((steps < qmin - 1).mean()),
        "clipped_high": float((steps > qmax + 1).mean()),
        "levels": len(np.unique(integers.clip(qmin, qmax))) / (qmax - qmin + 1),
    }


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_statistics_are_those_of_the_formula(bits: int) -> None:
    torch.manual_seed(bits)
    x = torch.randn(64, 8)
    model = qat.prepare(nn.Sequential(nn.Linear(8, 5)), qat.QuantRecipe({"bits": bits}, {"bits": bits}), x)
    qat.calibrate(model, [x / 2])
    with torch.no_grad():
        model[0].weight *= 1.5  # some are clipped now
    found = quantizer_statistics(model.train(), x)
    assert model.training and not any(each._forward_hooks for each in model.modules())
    assert found["0.weight_quantizer"] == pytest.approx(by_hand(model[0].weight, model[0].weight_quantizer), rel=1e-5)
    assert found["input_quantizer"] == pytest.approx(by_hand(x, model.input_quantizer), rel=1e-5)
    assert found["input_quantizer"]["clipped_low"] > 0 < found["0.weight_quantizer"]["clipped_high"]
    with qat.disable_fake_quant(model, activations=False):
        assert quantizer_statistics(model, x).keys() == {"input_quantizer"}


def test_values_just_beyond_the_last_level_are_not_clipped() -> None:
    """Point 25: white pixels a hundredth of a step beyond where the last level ends."""
    x = torch.tensor([[0.0, 0.1, 0.5, 1.0]])
    model = qat.prepare(nn.Sequential(nn.Linear(4, 2)), example_inputs=x)
    qat.calibrate(model, [x])
    scale, zero_point = model.input_quantizer.grid()
    ends = [-0.51, -0.9, 255.51, 255.9]
    near = quantizer_statistics(model, (torch.tensor([ends]) - zero_point) * scale)["input_quantizer"]
    assert near["clipped_low"] == near["clipped_high"] == 0
    far = quantizer_statistics(model, (torch.tensor([[*ends[:2], 256.1, 300.0]]) - zero_point) * scale)
    assert far["input_quantizer"]["clipped_high"] == 0.5


def test_a_large_tensor_is_sampled_and_the_sample_is_fair() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64, 24, 24)
    model = qat.prepare(nn.Sequential(nn.Conv2d(64, 64, 3)), example_inputs=x[:1])
    qat.calibrate(model, [x])
    found = quantizer_statistics(model, x)
    whole = by_hand(model[0].weight, model[0].weight_quantizer)
    assert found["0.weight_quantizer"]["sqnr"] == pytest.approx(whole["sqnr"], abs=0.3)
    assert found["input_quantizer"]["sqnr"] == pytest.approx(by_hand(x, model.input_quantizer)["sqnr"], abs=0.3)


def test_learned_values_are_drawn_relative_to_where_they_started() -> None:
    x = torch.randn(64, 8)
    model = qat.prepare(nn.Sequential(nn.Linear(8, 4)), example_inputs=x)
    qat.calibrate(model, [x])
    quantizers = {"w": model[0].weight_quantizer, "x": model.input_quantizer}
    start = learned_statistics(quantizers)
    assert float(start["scale/w"]) == pytest.approx(1) and float(start["at_floor/x"]) == 0
    with torch.no_grad():
        model[0].weight_quantizer.scale[:2] *= 4  # half of the channels: the geometric mean doubles
        model.input_quantizer.scale.mul_(-1)
    moved = learned_statistics(quantizers)
    assert float(moved["scale/w"]) == pytest.approx(2)
    assert float(moved["scale/x"]) == pytest.approx(1 / 32) and float(moved["at_floor/x"]) == 1
    assert float(moved["zero_point/x"]) == float(model.input_quantizer.zero_point)


class Net(nn.Module):
    """Convolutions with BatchNorm, an activation that works in place, a sum, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Hardswish(inplace=True)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.first(x)))
        x = (x + self.second(x)).flatten(2).transpose(1, 2)
        return self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.fixture
def net() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 6, 6)
    recipe = qat.QuantRecipe(overrides={"second": {"weight": {"bits": 2}}})
    model = qat.prepare(Net(), recipe, x)
    qat.calibrate(model, [x])
    return model, x


def test_the_layer_to_blame_has_the_lowest_error_of_its_own(net: tuple[Any, torch.Tensor]) -> None:
    model, x = net
    found = {each.name: each for each in layer_errors(model.train(), x)}
    assert model.training and not any(each.is_disabled for each in model.modules() if isinstance(each, Quantizer))
    assert list(found)[:2] == ["first", "second"] and list(found)[-2:] == ["last", "output"]
    local = {name: each.local for name, each in found.items() if each.local is not None}
    assert min(local, key=lambda name: local[name]) == "second" and local["second"] < 20
    assert all(value > 30 for name, value in local.items() if name != "second")
    # What is behind it inherits its error, what is before does not.
    cumulative = {name: each.cumulative for name, each in found.items()}
    assert min(cumulative, key=lambda name: cumulative[name]) not in ("first", "output") and cumulative["first"] > 35
    assert found["last"].cumulative < local["last"]
    with torch.no_grad(), qat.disable_fake_quant(model.eval()):
        y = model(x)
    assert found["output"].cumulative == pytest.approx(decibels(y, model(x).detach()), abs=0.01)
    # The first layer alone: its input and its weight on their grids, its BatchNorm in float.
    with torch.no_grad():
        on_grid, weight = model.input_quantizer(x), model.first.weight_quantizer(model.first.weight)
        outputs = [
            model.norm(nn.functional.conv2d(each, kernel, model.first.bias, padding=1))
            for each, kernel in ((x, model.first.weight), (on_grid, weight))
        ]
    assert found["first"].local == pytest.approx(decibels(*outputs), abs=0.05)


def test_every_quantizer_is_looked_at(net: tuple[Any, torch.Tensor]) -> None:
    model, x = net
    names = {name for name, each in model.named_modules() if isinstance(each, Quantizer)}
    assert quantizer_statistics(model, x).keys() == names


@pytest.mark.parametrize("rule", ["dorefa", "apot", "binary", "minmax"])
def test_rules_off_the_uniform_grid_have_an_error_too(rule: str) -> None:
    x, recipe = torch.randn(64, 8), qat.QuantRecipe({"rule": rule, "bits": 1 if rule == "binary" else 4})
    model = qat.prepare(nn.Sequential(nn.Linear(8, 4)), recipe, x)
    qat.calibrate(model, [x])
    with torch.no_grad():
        row = quantizer_statistics(model, x)["0.weight_quantizer"]
        weight = model[0].weight
        assert row["sqnr"] == pytest.approx(decibels(weight, model[0].weight_quantizer(weight)), rel=1e-4)
    assert ("levels" in row) == (model[0].weight_quantizer.uniform and model[0].weight_quantizer.exportable)


def test_what_cannot_be_looked_at_is_a_sentence() -> None:
    with pytest.raises(TypeError, match="quantizer_statistics: "):
        quantizer_statistics("model", torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no quantizer"):
        layer_errors(nn.Linear(2, 2), torch.zeros(1, 2))
