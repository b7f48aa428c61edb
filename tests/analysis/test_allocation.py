"""`cost`, against figures by hand; `layer_losses`: what a layer alone loses; `allocate`: the best of all choices."""

import itertools
import math
import random
import re
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import qat
from qat.analysis.cost import BETWEEN, LayerCost
from tests.references.prepared_case import Plain

CHOICES = (2, 4, 8)


def brute_force(losses: Any, costs: Any, budgets: dict[str, float]) -> float:
    """The least sum of losses of all choices within the budgets."""
    fitting = (
        sum(losses[layer][bits] for layer, bits in zip(losses, chosen, strict=True))
        for chosen in itertools.product(CHOICES, repeat=len(losses))
        if all(
            sum(costs[kind][layer][bits] for layer, bits in zip(losses, chosen, strict=True)) <= most
            for kind, most in budgets.items()
        )
    )
    return min(fitting)


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all_choices(seed: int) -> None:
    drawn = random.Random(seed)
    names = [f"layer{i}" for i in range(7)]
    unit = 10.0 ** drawn.randint(-9, 3)  # a loss may be of any size
    losses = {name: {bits: unit * drawn.random() ** 3 / bits for bits in CHOICES} for name in names}
    sizes = {name: drawn.randint(1, 500) for name in names}
    costs = {
        "bytes": {name: {bits: sizes[name] * bits for bits in CHOICES} for name in names},
        "ms": {name: {bits: drawn.random() * bits for bits in CHOICES} for name in names},
    }
    budgets = {"bytes": 4.0 * sum(sizes.values()), "ms": 0.6 * sum(row[8] for row in costs["ms"].values())}
    found = qat.allocate(losses, costs, budgets)
    assert list(found) == names
    assert all(
        sum(costs[kind][name][found[name]] for name in names) <= most * (1 + 1e-6) for kind, most in budgets.items()
    )
    assert sum(losses[name][found[name]] for name in names) == pytest.approx(brute_force(losses, costs, budgets))


def test_without_a_budget_it_is_the_least_loss_of_each() -> None:
    assert qat.allocate({"a": {4: 1.0, 8: 2.0}, "b": {4: 1.0, 8: 0.0}}, {}, {}) == {"a": 4, "b": 8}


def test_budgets_that_cannot_be_kept_are_sentences() -> None:
    losses, costs = {"a": {4: 1.0, 8: 0.0}}, {"bytes": {"a": {4: 50.0, 8: 100.0}}}
    with pytest.raises(ValueError, match=r"^allocate: the cheapest choices take 50 bytes, and the budget is 40$"):
        qat.allocate(losses, costs, {"bytes": 40})
    with pytest.raises(ValueError, match=r"^allocate: a budget of 'ms', and costs of 'bytes'$"):
        qat.allocate(losses, costs, {"ms": 40})


def test_a_budget_of_0_is_kept_and_budgets_that_exclude_each_other_are_a_sentence() -> None:
    assert qat.allocate({"a": {8: 0.0, 4: 1.0}}, {"k": {"a": {8: 0.5, 4: 0.0}}}, {"k": 0}) == {"a": 4}
    costs = {"b": {"a": {2: 1.0, 8: 4.0}}, "ms": {"a": {2: 4.0, 8: 1.0}}}
    with pytest.raises(ValueError, match=r"^allocate: no choice keeps all budgets at once$"):
        qat.allocate({"a": {2: 1.0, 8: 0.0}}, costs, {"b": 1, "ms": 1})


@pytest.mark.parametrize(
    ("losses", "costs", "budget", "said"),
    [
        ({"a": {4: 1.0, 8: math.nan}}, {"a": {4: 1, 8: 2}}, 2, "the loss of 'a' at 8 must be a number, got nan"),
        ({"a": {4: 1.0}}, {"a": {4: -1.0}}, 2, "what 'k' has of 'a' at 4 must be a number from 0, got -1.0"),
        ({"a": {4: 1.0, 8: 0.0}}, {"a": {4: 1.0}}, 2, "what 'k' has of 'a' at 8 must be a number from 0, got nan"),
        ({"a": {4: 1.0}}, {"a": {4: 1.0}}, math.nan, "the budget of k must be a number from 0, got nan"),
        ({"a": {4: 1.0}}, {"a": {4: 1.0}}, -1, "the budget of k must be a number from 0, got -1"),
        ({"a": {}}, {}, 1, "every layer needs choices, and there must be a layer"),
        ({}, {}, 1, "every layer needs choices, and there must be a layer"),
    ],
)
def test_what_is_no_number_is_a_sentence(losses: Any, costs: Any, budget: float, said: str) -> None:
    with pytest.raises(ValueError, match=f"^allocate: {re.escape(said)}$"):
        qat.allocate(losses, {"k": costs}, {"k": budget})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))


def calibrated(float_model: nn.Module, x: torch.Tensor, bits: dict[str, int]) -> nn.Module:
    overrides = {name: {"weight": {"bits": each}, "activation": {"bits": each}} for name, each in bits.items()}
    model = qat.prepare(float_model, qat.QuantRecipe(overrides=overrides, residual_bits=8), x[:2])
    qat.calibrate(model, [x])
    return model


def test_a_loss_is_the_divergence_of_the_answers_with_one_layer_quantized() -> None:
    float_model, x = net().eval(), torch.randn(32, 3, 8, 8)
    names = ["0", "2", "5"]
    model = calibrated(float_model, x, dict.fromkeys(names, 3)).train()
    losses = qat.layer_losses(model, x.split(8))
    assert list(losses) == names and model.training
    for name, loss in losses.items():
        others = [other for other in names if other != name]
        with qat.disable_fake_quant(model, others), torch.no_grad():
            answers = torch.log_softmax(model.eval()(x).double(), 1)
        expected = torch.log_softmax(float_model(x).detach().double(), 1)
        assert loss == pytest.approx(float((expected.exp() * (expected - answers)).sum(1).mean()), rel=1e-6)


def test_the_bits_of_a_small_net_are_the_best_of_all_by_its_own_losses() -> None:
    float_model, x = net().eval(), torch.randn(64, 3, 8, 8)
    names = ["0", "2", "5"]
    models = {bits: calibrated(float_model, x, dict.fromkeys(names, bits)) for bits in CHOICES}
    found = {bits: qat.layer_losses(model, [x]) for bits, model in models.items()}
    rows = {bits: {row.name: row for row in qat.cost(model, x[:1])} for bits, model in models.items()}
    losses = {name: {bits: found[bits][name] for bits in CHOICES} for name in names}
    sizes = {name: {bits: float(rows[bits][name].weight_bytes) for bits in CHOICES} for name in names}
    budget = {"bytes": sum(row[4] + row[8] for row in sizes.values()) / 2}
    chosen = qat.allocate(losses, {"bytes": sizes}, budget)
    assert sum(losses[name][chosen[name]] for name in names) == pytest.approx(
        brute_force(losses, {"bytes": sizes}, budget)
    )
    assert len({*chosen.values()}) > 1
    mixed, uniform = (
        (calibrated(float_model, x, bits).eval()(x) - float_model(x)).detach().square().mean()
        for bits in (chosen, dict.fromkeys(names, 4))
    )
    assert mixed < uniform


def test_one_channel_is_a_class_against_the_rest() -> None:
    """Point 35: masks (N, 1, H, W); the loss is the divergence of what sigmoid says of each pixel."""
    float_model, x = nn.Sequential(nn.Conv2d(3, 1, 3)).eval(), torch.randn(8, 3, 8, 8)
    model = calibrated(float_model, x, {"0": 3})
    with torch.no_grad():
        p, q = (torch.sigmoid(each.eval()(x).double()) for each in (float_model, model))
    expected = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert qat.layer_losses(model, [x]) == {"0": pytest.approx(float(expected.mean()), rel=1e-5)}


def test_a_model_without_quantizers_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"^layer_losses: the model has no quantizer in use; call qat\.prepare first$"):
        qat.layer_losses(net(), torch.randn(2, 3, 8, 8))


def test_a_model_without_classes_and_no_batch_are_sentences() -> None:
    x = torch.randn(4, 3)
    model = calibrated(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).eval(), x, {"0": 4})
    with pytest.raises(ValueError, match=r"^layer_losses: it compares .* the model gives \(4,\)$"):
        qat.layer_losses(model, x)
    with pytest.raises(ValueError, match=r"^layer_losses: there is no batch$"):
        qat.layer_losses(model, [])


def test_resnet18_has_the_macs_of_its_shapes() -> None:
    """7x7 from 3 to 64 channels at 112x112; 3x3 and 1x1 at 56, 28, 14 and 7; the head: 1.814 G."""
    image = torch.zeros(1, 3, 224, 224)
    float_model = torchvision.models.resnet18()
    stem, head = 112 * 112 * 64 * 3 * 49, 512 * 1000
    stages = 4 * 56 * 56 * 64 * 64 * 9  # layer1
    for channels, side in ((128, 28), (256, 14), (512, 7)):
        first, others, shortcut = channels // 2 * 9, 3 * channels * 9, channels // 2
        stages += side * side * channels * (first + others + shortcut)
    model = qat.prepare(float_model, qat.QuantRecipe(weight={"bits": 4}), image[..., :64, :64])
    rows = {row.name: row for row in qat.cost(model, image)}
    assert sum(row.macs for row in rows.values()) == stem + stages + head == 1_814_073_344
    assert len(rows) == 21 and rows["conv1"] == LayerCost("conv1", stem, 4, 8, 64 * 3 * 49 // 2)
    assert rows["conv1"].bops == stem * 4 * 8
    floats = qat.cost(float_model, image)
    assert [(row.name, row.macs) for row in floats][:2] == [("conv1", stem), ("layer1.0.conv1", 56 * 56 * 64 * 64 * 9)]
    assert {(row.weight_bits, row.activation_bits) for row in floats} == {(32, 32)}
    assert sum(row.bops for row in floats) == 1_814_073_344 * 1024


def test_groups_transposed_and_shared_layers() -> None:
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    layers = {"depthwise": depthwise, "up": nn.ConvTranspose2d(8, 4, 2, stride=2), "fc": nn.Linear(4, 4)}
    net = Plain(lambda self, x: self.fc(self.fc(self.up(self.depthwise(x)).mean((2, 3)))), **layers)
    x = torch.zeros(1, 8, 5, 5)
    model = qat.prepare(net, qat.QuantRecipe(overrides={"up": {"skip": True}}), x)
    rows = {row.name: row for row in qat.cost(model, x)}
    macs = {"depthwise": 25 * 8 * 9, "up": 25 * 8 * 4 * 4, "fc": 2 * 16}
    assert {name: row.macs for name, row in rows.items()} == macs
    assert rows["up"] == LayerCost("up", 25 * 8 * 4 * 4, 32, 32, 4 * 8 * 4 * 4)
    assert rows["fc"].weight_bytes == 16


def test_products_of_activations_have_a_row_and_switched_off_is_float() -> None:
    x = torch.randn(1, 5, 8)
    model = qat.prepare(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), example_inputs=x)
    *rows, between = qat.cost(model, x)
    assert sum(row.macs for row in rows) == 5 * (4 * 8 * 8 + 2 * 8 * 16)
    assert between == LayerCost(BETWEEN, 2 * 5 * 5 * 8, 8, 8, 0)
    assert sum(row.weight_bytes for row in rows) == 4 * 8 * 8 + 2 * 8 * 16
    with qat.disable_fake_quant(model):
        assert {(row.weight_bits, row.activation_bits) for row in qat.cost(model, x)} == {(32, 32)}
    assert {row.weight_bits for row in qat.cost(model, x)} == {8}
    with pytest.raises(ValueError, match="cost: example_inputs do not fit"):
        qat.cost(model, {"images": x})


def test_a_layer_with_two_names_and_a_model_of_one_layer() -> None:
    shared = nn.Linear(4, 4)
    twice = nn.Sequential(nn.Sequential(shared), nn.Sequential(nn.ReLU(), shared))
    for model, expected in ((twice, ("0.0", 32)), (shared, ("", 16))):
        assert [(row.name, row.macs) for row in qat.cost(model, torch.zeros(1, 4))] == [expected]


def test_the_model_is_left_as_it_was() -> None:
    x = torch.randn(3, 4)
    model = qat.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(), example_inputs=x)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    qat.cost(model, x)
    assert model.training and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
