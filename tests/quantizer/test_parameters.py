"""What training gets of quantizers: groups of parameters, annealing by progress, penalties, bit widths."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qat
from qat import QuantRecipe, QuantSpec, freeze_scales, parameter_groups, prepare
from qat.quantizer import create_quantizer
from qat.training.loop.aids import Aids
from tests.references import rule_specs as specs
from tests.references.prepared_case import refused
from tests.references.rule_specs import fitted, tensor_of
from tests.runs.rule_training import same_state, state_of


class Zoo(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.ln = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm([4, 2])
        self.gn, self.prelu = nn.GroupNorm(2, 4), nn.PReLU(4)
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = nn.Parameter(torch.ones(4, 4))
        self.again = self.tied
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 2)
        self.head.quantizer = create_quantizer(QuantSpec(bits=4, granularity="channel"), "weight", (2, 1))
        affine = QuantSpec(signed=False, symmetric=False, rule="lsq_plus")
        self.outer = nn.ModuleDict({"inner": create_quantizer(affine)})
        self.outer.inner.helper = nn.Linear(1, 1)
        self.outer.shared = self.outer.inner


INNER = ["scale", "zero_point", "helper.weight", "helper.bias"]


def names_of(model: nn.Module, parameters: list[Tensor]) -> list[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in parameters]


def rates(groups: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(g["name"], g["lr"], g["weight_decay"]) for g in groups]


def test_every_trainable_parameter_is_in_the_right_group_once() -> None:
    model = Zoo()
    groups = parameter_groups(model, 0.2, 0.3, norm_weight_decay=0.4)
    assert rates(groups) == [
        ("weights", 0.2, 0.3),
        ("norms", 0.2, 0.4),
        ("biases", 0.2, 0.4),
        ("quantizers_8_bits", pytest.approx(0.02), 0.0),
        ("quantizers_4_bits", 0.2, 0.0),
    ]
    assert [names_of(model, g["params"]) for g in groups] == [
        ["layer_scale", "conv.weight", "tied.weight", "head.weight"],
        ["bn.weight", "bn.bias", "ln.weight", "ln.bias", "gn.weight", "gn.bias"],
        ["conv.bias", "prelu.weight", "head.bias"],
        [f"outer.inner.{name}" for name in INNER],
        ["head.quantizer.scale"],
    ]
    torch.optim.AdamW(groups)


def test_without_a_decay_nothing_decays() -> None:
    """Point 26: `weight_decay` had no default, though torch's SGD has one."""
    assert {group["weight_decay"] for group in parameter_groups(Zoo(), 0.1)} == {0.0}


def test_a_factor_of_ones_own_makes_one_group() -> None:
    groups = parameter_groups(nn.ModuleList([Zoo().outer, Zoo().head]), 0.2, 0.3, quantizer_lr_factor=0.5)
    assert rates(groups) == [("weights", 0.2, 0.3), ("biases", 0.2, 0.0), ("quantizers", 0.1, 0.0)]
    assert [len(g["params"]) for g in groups] == [1, 1, 5]


def test_a_rate_and_a_decay_of_their_own_hold_for_all_quantizers() -> None:
    groups = parameter_groups(Zoo().outer, 0.2, 0.3, quantizer_lr=1e-5, quantizer_weight_decay=0.1)
    assert rates(groups) == [("quantizers", 1e-5, 0.1)]
    by_bits = parameter_groups(Zoo().outer, 0.2, 0.3, quantizer_weight_decay=0.1)
    assert rates(by_bits) == [("quantizers_8_bits", pytest.approx(0.02), 0.1)]


def test_frozen_scales_stay_in_their_group() -> None:
    model = Zoo()
    before = [names_of(model, g["params"]) for g in parameter_groups(model, 0.1, 0.0)]
    freeze_scales(model)
    assert [names_of(model, g["params"]) for g in parameter_groups(model, 0.1, 0.0)] == before
    freeze_scales(model, False)
    model.head.quantizer.requires_grad_(False)
    assert [g["name"] for g in parameter_groups(model, 0.1, 0.0)][3:] == ["quantizers_8_bits"]


class Reader(nn.Module):
    """Weights that layers own, that functions read from another module, and that stay in float."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.read, self.both = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm, self.left = nn.LSTM(4, 4, batch_first=True, bias=False), nn.Linear(4, 4)
        self.wide, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.wide.weight

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(self.own(self.tied(self.wide(self.lstm(x)[0]))), self.read.weight * 2.0)
        x = functional.linear(self.both(x), self.both.weight[:2].repeat(2, 1))
        return self.left(self.attention(x, x, self.normed(x), need_weights=False)[0])


def test_weights_are_in_the_group_of_their_fewest_bits() -> None:
    grids = {
        "own": {"weight": {"bits": 3}},
        "wide": {"weight": {"bits": 8}},
        "both": {"weight": {"bits": 1, "rule": "binary"}},
        "left": {"skip": True},
    }
    recipe = QuantRecipe(weight=QuantSpec(bits=2), overrides=grids)
    model = prepare(Reader(), recipe, torch.randn(2, 5, 4))
    groups = {g["name"]: g for g in parameter_groups(model, 0.1, 0.4, weight_decay_by_bits=True)}
    found = {kind: set(names_of(model, group["params"])) for kind, group in groups.items() if kind[:6] == "weight"}
    assert found == {
        "weights": {"left.weight"},
        "weights_3_bits": {"own.weight"},
        "weights_2_bits": {
            "read.weight", "normed.parametrizations.weight.original0", "normed.parametrizations.weight.original1",
            "attention.in_proj_weight", "attention.out_proj.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0",
            "wide.weight",
        },
        "weights_1_bits": {"both.weight"},
    }  # fmt: skip
    assert [groups[kind]["weight_decay"] for kind in found] == [0.4, 0.2, 0.1, 0.1]
    plain = {g["name"]: g for g in parameter_groups(model, 0.1, 0.4)}
    assert set(names_of(model, plain["weights"]["params"])) == set().union(*found.values())


@pytest.mark.parametrize(("given", "fact"), [
    ({"lr": -0.1}, "lr must be a number of at least 0, got -0.1"),
    ({"lr": "0.1"}, "lr must be a number of at least 0, got '0.1'"),
    ({"quantizer_lr_factor": -1}, "quantizer_lr_factor must"),
    ({"quantizer_lr": "1e-5"}, "quantizer_lr must"),
    ({"quantizer_weight_decay": -1}, "quantizer_weight_decay must"),
    ({"quantizer_lr": 1e-5, "quantizer_lr_factor": 0.1}, "quantizer_lr_factor=0.1 and quantizer_lr=1e-05"),
])  # fmt: skip
def test_wrong_rates_are_refused(given: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parameter_groups(nn.Linear(2, 2), **{"lr": 0.1, "weight_decay": 0.0, **given})
    assert fact in str(refusal.value)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1, 0.0)


def test_annealed_rules_follow_the_progress():
    model = nn.ModuleList(fitted(role, spec) for role, spec in specs.QUANTIZERS.values())
    others = [q for q in model if q.spec.rule != "stacked_sigmoid" and "progress" not in q.state_dict()]
    before = [state_of(q) for q in others]
    for progress in (0.0, 0.25, 1.0):
        qat.set_progress(model, progress)
        seen = 0
        for quantizer in model:
            if quantizer.spec.rule == "stacked_sigmoid":
                start, end = (quantizer.spec.options.get(*entry) for entry in (("start", 5.0), ("end", 100.0)))
                assert quantizer.temperature.item() == pytest.approx(start * (end / start) ** progress, rel=1e-6)
                assert torch.equal(quantizer.state_dict()["temperature"], quantizer.temperature)
                seen += 1
            elif quantizer.spec.options.get("gradient") == "error_decay":
                assert quantizer.state_dict()["progress"].item() == progress
                seen += 1
        assert seen == 7
    assert all(same_state(state_of(q), old) for q, old in zip(others, before, strict=True))


@pytest.mark.parametrize("progress", [-0.1, 1.01, float("nan")])
def test_progress_outside_is_refused(progress):
    with refused(f"set_progress: progress must be from 0 to 1, got {progress!r}"):
        qat.set_progress(fitted(*specs.QUANTIZERS["weight stacked_sigmoid"]), progress)


def test_the_soft_staircase_hardens_and_the_sign_sharpens():
    soft = fitted("weight", specs.weight("stacked_sigmoid", 4, start=1.0, end=1000.0))
    x = tensor_of("weight", soft.spec, seed=1)
    rounded = soft.eval()(x)
    gaps = []
    for progress in (0.0, 0.5, 1.0):
        qat.set_progress(soft.train(), progress)
        gaps.append((soft(x) - rounded).abs().mean().item())
    assert gaps[0] > 2 * gaps[1] > 8 * gaps[2] > 0
    for role in ("weight", "activation"):
        sharp = fitted(role, specs.activation("binary", 1, specs.SIGNED, {"init": "mse"}, gradient="error_decay"))
        x = torch.tensor([[-1.5, 0.3, 0.7]]) * (sharp.scale.detach() if role == "activation" else 1)
        for progress in (0.0, 0.5, 1.0):
            qat.set_progress(sharp, progress)
            given = x.clone().requires_grad_()
            sharp(given).sum().backward()
            t = 0.1 * 10 ** (2 * progress)
            expected = max(1 / t, 1) * t * (1 - np.tanh(t * np.array([[-1.5, 0.3, 0.7]])) ** 2)
            np.testing.assert_allclose(given.grad.numpy(), expected, rtol=2e-4, atol=1e-6)


def test_the_penalty_is_the_sum_of_the_rules_formulas():
    model = nn.ModuleList(fitted(role, spec) for role, spec in specs.QUANTIZERS.values())
    expected, slopes = 0.0, []
    for quantizer in model:
        rule, slope = quantizer.spec.rule, {}
        if rule == "pact":
            quantizer.alpha.data.mul_(1.3)
            decay, alpha = quantizer.spec.options.get("alpha_decay", 2e-4), quantizer.alpha.item()
            expected, slope = expected + decay / 2 * alpha**2, {"alpha": decay * alpha}
        if rule == "learned_bits":
            quantizer.bits.data.sub_(0.3)
            elements = 6 * 8 * 9 if quantizer.role == "weight" else 8 * 9  # of a weight all, of one sample
            cost = quantizer.spec.options.get("cost", 0.1) * 1e-6 * elements
            expected, slope = expected + cost * round(quantizer.bits.item()), {"bits": cost}
        slopes.append({name: value for name, value in slope.items() if value})
    total = qat.penalty(model)
    assert total.shape == () and total.item() == pytest.approx(expected, rel=1e-5)
    total.backward()
    for quantizer, wanted in zip(model, slopes, strict=True):
        found = {name: each.grad.item() for name, each in quantizer.named_parameters() if each.grad is not None}
        assert found == pytest.approx(wanted, rel=1e-5)
    silent = nn.ModuleList(q for q in model if q.spec.rule not in ("pact", "learned_bits"))
    assert qat.penalty(silent).item() == 0.0 and not qat.penalty(silent).requires_grad


def test_a_million_elements_cost_the_same_in_half_precision():
    spec = specs.weight("learned_bits", cost=1.0)
    quantizer = fitted("weight", spec, torch.randn(4, 250, 1000))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert qat.penalty(quantizer.to(dtype)).item() == pytest.approx(8.0, rel=0.01)


def test_the_trainer_does_what_penalty_and_set_progress_do():
    model = nn.ModuleList(fitted(role, spec) for role, spec in specs.QUANTIZERS.values())
    aids, twin = Aids(model), copy.deepcopy(model)
    aids.before_step(0.7)
    qat.set_progress(twin, 0.7)
    assert same_state(state_of(model), state_of(twin))
    added = aids.added(torch.empty(0), torch.empty(0))
    assert list(added) == ["penalty_loss"]
    torch.testing.assert_close(added["penalty_loss"], qat.penalty(twin))
    Aids(nn.Linear(2, 2)).before_epoch(pytest.fail, iter(()))  # nothing to do without quantizers


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)])
def test_a_high_cost_ends_at_few_bits_and_a_low_one_at_many(optimizer):
    """Point 54: widths learned by the rate of scales, and so not at all, whatever they cost."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    width = {}
    for cost in (1e-4, 1e6):
        torch.manual_seed(0)
        spec = specs.weight("learned_bits", 8, cost=cost)
        layer = qat.QuantLinear(16, 32, weight_spec=spec)
        teacher = layer.weight.detach().clone()
        qat.calibrate(layer, [x])
        steps = optimizer(qat.parameter_groups(layer, lr=1e-3, weight_decay=0.01))
        for _ in range(200):
            loss = (layer(x) - x @ teacher.T).square().sum(1).mean() + qat.penalty(layer)
            loss.backward()
            steps.step()
            steps.zero_grad()
        width[cost] = int(layer.weight_quantizer.effective_bits().round())
    assert width[1e6] == 2 and width[1e-4] >= 6
