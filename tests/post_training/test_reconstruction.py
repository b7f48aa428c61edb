"""AdaRound, BRECQ and QDrop: what they minimise, against NumPy and against all roundings; what they leave as it was."""

import copy
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.layers import QuantLinear
from qat.post_training import BRECQ, AdaRound, QDrop
from qat.post_training.reconstruction import SoftRounding
from qat.post_training.stretches import stretches
from tests.references.prepared_case import Plain

FEW = {"bits": 3}


def net() -> nn.Module:
    """A chain, a residual block, a transposed convolution, and a head."""
    torch.manual_seed(0)
    convolutions = {"conv1": nn.Conv2d(8, 8, 3, padding=1, bias=False), "conv2": nn.Conv2d(8, 8, 3, padding=1)}
    block = Plain(
        lambda self, x: torch.relu(x + self.conv2(torch.relu(self.bn1(self.conv1(x))))),
        bn1=nn.BatchNorm2d(8),
        **convolutions,
    )
    layers = {"stem": nn.Conv2d(3, 8, 3), "up": nn.ConvTranspose2d(8, 4, 2, stride=2), "fc": nn.Linear(4, 5)}
    model: nn.Module = Plain(
        lambda self, x: self.fc(torch.relu(self.up(self.block(torch.relu(self.stem(x))))).mean((2, 3))),
        block=block,
        **layers,
    )
    for each in model.modules():
        if isinstance(each, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            nn.init.kaiming_normal_(each.weight)
    for _ in range(20):
        model(torch.randn(16, 3, 8, 8))  # BatchNorm's statistics
    return model.eval()


def images(count: int = 64) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def prepared(steps: list[Any]) -> Any:
    model = qat.prepare(net(), qat.QuantRecipe(FEW, {"bits": 4}), images(2))
    qat.calibrate(model, images().split(32), steps=steps)
    return model.eval()


def error(model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - net()(x)).square().mean())


def test_the_soft_weight_and_its_gradient_are_the_papers() -> None:
    torch.manual_seed(0)
    layer = QuantLinear(6, 4, weight_spec=qat.QuantSpec(bits=3))
    soft = SoftRounding(layer)
    weight, v = layer.weight.detach().double().numpy(), soft.v.detach().double().numpy()
    scale = soft.scale.double().numpy()
    h = np.clip(1.2 / (1 + np.exp(-v)) - 0.1, 0, 1)
    expected = scale * np.clip(np.floor(weight / scale) + h, -4, 3)
    np.testing.assert_allclose(soft().detach().numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(expected, np.clip(weight, -4 * scale, 3 * scale), atol=1e-6)  # it starts from w
    (soft().sum() + soft.penalty(4.0)).backward()  # type: ignore[no-untyped-call]
    slope = 1.2 * np.exp(-v) / (1 + np.exp(-v)) ** 2
    inside = (np.floor(weight / scale) + h > -4) & (np.floor(weight / scale) + h < 3)
    penalty = -4 * np.abs(2 * h - 1) ** 3 * np.sign(2 * h - 1) * 2
    assert soft.v.grad is not None
    np.testing.assert_allclose(soft.v.grad.numpy(), slope * (scale * inside + penalty), atol=1e-4)


def test_adaround_finds_a_rounding_near_the_best_of_all() -> None:
    torch.manual_seed(3)
    float_model = nn.Sequential(nn.Linear(10, 1, bias=False))
    x = torch.randn(256, 10) @ torch.randn(10, 10)  # inputs that depend on each other
    recipe = qat.QuantRecipe({"bits": 3, "init": "minmax"}, {"bits": 8})
    model = qat.prepare(float_model, recipe, x)
    qat.calibrate(model, [x])
    layer: Any = model.get_submodule("0")
    scale = layer.weight_quantizer.grid()[0].detach()
    lower = torch.floor(layer.weight.detach() / scale)
    choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=10)))
    codes = (lower + choices).clamp(-4, 3)
    inputs, target = model.get_submodule("input_quantizer")(x), float_model(x).detach()
    losses = (inputs @ (codes * scale).T - target).square().mean(0).detach()
    rounded = torch.round(layer.weight.detach() / scale)
    nearest = (inputs @ (rounded * scale).T - target).square().mean().item()
    qat.calibrate(model, [x], steps=[AdaRound(iterations=1500)])
    found = (inputs @ layer.weight.detach().T - target).square().mean().item()
    assert 0.999 * losses.min() < found < 1.2 * losses.min() < nearest


@pytest.mark.parametrize("step", [AdaRound, BRECQ, QDrop])
def test_the_model_answers_better_and_its_weights_lie_on_their_levels(step: type[AdaRound], tmp_path: Path) -> None:
    x = images(256)
    before, model = prepared([]), prepared([step(iterations=200)])
    assert error(model, x) < 0.8 * error(before, x)
    for name, layer in model.named_modules():
        if isinstance(layer, qat.layers.QuantLayer):
            rows = layer.channels_first(layer.weight)
            assert torch.allclose(layer.weight_quantizer(rows), rows, atol=1e-6), name
            other: Any = before.get_submodule(name)
            assert torch.equal(layer.weight_quantizer.scale, other.weight_quantizer.scale)
            codes, others = (each.weight_quantizer.codes(each.channels_first(each.weight)) for each in (layer, other))
            low, high = layer.weight_quantizer.bounds()
            inside = (codes > low) & (codes < high)
            assert ((codes - others).abs() <= 1)[inside].all()
    with torch.no_grad():
        assert torch.equal(qat.convert(model, "reference")(x), model(x))
    assert qat.verify_onnx(qat.export_onnx(model, tmp_path / "m.onnx", x[:1]) or tmp_path / "m.onnx", model, [x])


def test_only_qdrop_moves_the_scales_of_activations() -> None:
    plain, rounded, dropped = (prepared(steps) for steps in ([], [BRECQ(iterations=20)], [QDrop(iterations=20)]))
    name = "block.conv1_quantizer"
    scales = [model.get_submodule(name).scale for model in (plain, rounded, dropped)]
    assert torch.equal(scales[0], scales[1]) and not torch.equal(scales[0], scales[2])


def test_a_frozen_scale_stays() -> None:
    model = prepared([])
    qat.freeze_scales(model)
    before = copy.deepcopy(model.get_submodule("block.conv1_quantizer").scale)
    qat.calibrate(model, images(), steps=[QDrop(iterations=10)])
    assert torch.equal(model.get_submodule("block.conv1_quantizer").scale, before)


def test_stretches_are_residual_blocks_and_layers_of_a_chain() -> None:
    model = prepared([])
    found = [list(stretch.layers()) for stretch in stretches(model, copy.deepcopy(model), [images()], 16)]
    assert found == [["stem"], ["block.conv1", "block.conv2"], ["up"], ["fc"]]


def test_the_floats_of_a_stretch_are_the_float_models_whatever_was_rounded_before() -> None:
    model, x = prepared([]), images(8)
    expected = net()(x)
    for stretch in stretches(model, copy.deepcopy(model), [x], 4):
        for layer in stretch.layers().values():
            layer.weight.data.mul_(3)
        last = stretch.targets()
    torch.testing.assert_close(torch.cat(last), expected)


@pytest.mark.parametrize("spec", [{"granularity": "tensor"}, {"granularity": "group", "group_size": 4}])
def test_every_granularity(spec: dict[str, Any]) -> None:
    torch.manual_seed(0)
    float_model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(128, 8)
    errors = []
    for steps in ([], [AdaRound(iterations=300)]):
        model = qat.prepare(float_model.eval(), qat.QuantRecipe({**FEW, **spec}), x)
        qat.calibrate(model, [x], steps=steps)
        errors.append(float((model(x) - float_model(x)).detach().square().mean()))
    assert errors[1] < 0.9 * errors[0]


def test_steps_aim_at_the_float_model_and_not_at_what_steps_before_made() -> None:
    found, weight = list[bool](), net().state_dict()["stem.weight"]

    class Notes:
        before_ranges = False

        def run(self, model: nn.Module, original: nn.Module, batches: Any) -> str:
            found.extend(torch.equal(each.state_dict()["stem.weight"], weight) for each in (model, original))
            return "noted"

    prepared([AdaRound(iterations=20), Notes()])
    assert found == [False, True]


def test_an_answer_without_a_gradient_leaves_the_last_layer_to_the_nearest_level() -> None:
    x = torch.randn(64, 8)
    model: Any = qat.prepare(Plain(lambda self, x: self.fc(x).argmax(1), fc=nn.Linear(8, 3)), qat.QuantRecipe(FEW), x)
    before = model.fc.weight_quantizer.codes(model.fc.weight)
    qat.calibrate(model, x, steps=[BRECQ(iterations=20)])
    assert torch.equal(model.fc.weight_quantizer.codes(model.fc.weight), before)


def test_what_keeps_rounding_to_nearest_is_named(caplog: pytest.LogCaptureFixture) -> None:
    parts = {"weight": nn.Parameter(torch.randn(4, 4)), "fc": nn.Linear(4, 4)}
    reads = Plain(lambda self, x: self.fc(torch.relu(nn.functional.linear(x, self.weight))), **parts)
    x, ternary = torch.randn(16, 4), {"weight": {"rule": "ternary", "bits": 2}}
    model = qat.prepare(reads, qat.QuantRecipe(FEW, overrides={"fc": ternary}), x)
    with caplog.at_level(logging.INFO, "qat"):
        qat.calibrate(model, x, steps=[AdaRound(iterations=2)])
    (said,) = [message for message in caplog.messages if "AdaRound" in message]
    assert "of 0 weights" in said
    assert "rounded to nearest, since no graph calls them, once, with a weight of their own: linear" in said
    assert "since the rule 'ternary' finds its integers in a way of its own: fc" in said


def test_an_error_leaves_weights_as_they_were() -> None:
    class Failing(AdaRound):
        def run(self, model: nn.Module, original: nn.Module, batches: Any) -> str:
            super().run(model, original, batches)
            raise ValueError("no")

    model = prepared([])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"^no$"):
        qat.calibrate(model, images(), steps=[Failing(iterations=20)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def without_a_graph() -> None:
    qat.calibrate(nn.Sequential(QuantLinear(4, 2)), torch.randn(8, 4), steps=[AdaRound()])


MISTAKES: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (ValueError, r"calibrate: steps work on the graphs of qat\.prepare, and this model", without_a_graph),
    (
        TypeError,
        r"calibrate: steps are objects such as AdaRound\(\), got <class '.*BRECQ'>$",
        lambda: prepared([BRECQ]),
    ),
    (ValueError, "BRECQ: iterations and batch_size must be at least 1, got BRECQ", lambda: BRECQ(iterations=0)),
    (ValueError, "QDrop: lr and rounding_weight must be above 0, scale_lr at least 0, drop", lambda: QDrop(drop=1.5)),
]


@pytest.mark.parametrize(("error", "said", "call"), MISTAKES)
def test_mistakes_are_sentences(error: type[Exception], said: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=f"^{said}"):
        call()


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second, other = (prepared([QDrop(iterations=10, seed=seed)]).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert any(not torch.equal(value, other[name]) for name, value in first.items())


def test_training_goes_on_from_there() -> None:
    model = prepared([QDrop(iterations=20)]).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    before = model.stem.weight.detach().clone()
    assert all(p.grad is None for p in model.parameters())
    model(images(8)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.stem.weight, before) and all(p.requires_grad for p in model.parameters())


def shares() -> nn.Module:
    """A layer that is called twice, and another one with its weight."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    layers = {"first": first, "second": second}
    twice = Plain(lambda self, x: (y := torch.relu(self.first(torch.relu(self.first(x))))) + self.second(y), **layers)
    return twice.eval()


def test_a_weight_that_serves_twice_is_left_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """Rounded for one call, it would be worse for the other."""
    float_model, x = shares(), torch.randn(128, 8) @ torch.randn(8, 8)
    model: Any = qat.prepare(float_model, qat.QuantRecipe(FEW), x)
    with caplog.at_level(logging.INFO, "qat"):
        qat.calibrate(model, [x], steps=[BRECQ(iterations=20), AdaRound(iterations=20)])
    assert torch.equal(model.first.weight, float_model.first.weight)
    assert sum("once, with a weight of their own: first, second" in message for message in caplog.messages) == 2
