"""What rules add to training: annealing by progress, penalties in the loss, learned bit widths, which are exported."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

import qat
from qat.training.loop.aids import Aids
from tests.references import rule_specs as specs
from tests.references.prepared_case import refused
from tests.references.rule_specs import fitted, tensor_of
from tests.runs.rule_training import same_state, state_of


def test_annealed_rules_follow_the_progress():
    model = nn.ModuleList(fitted(role, spec) for role, spec in specs.QUANTIZERS.values())
    others = [state_of(q) for q in model if q.spec.rule != "stacked_sigmoid" and "progress" not in q.state_dict()]
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
    after = [state_of(q) for q in model if q.spec.rule != "stacked_sigmoid" and "progress" not in q.state_dict()]
    assert all(same_state(one, other) for one, other in zip(others, after, strict=True))


@pytest.mark.parametrize("progress", [-0.1, 1.01, float("nan")])
def test_progress_outside_is_refused(progress):
    with refused(f"set_progress: progress must be from 0 to 1, got {progress!r}"):
        qat.set_progress(fitted(*specs.QUANTIZERS["weight stacked_sigmoid"]), progress)


def test_the_soft_staircase_hardens_and_the_decayed_sign_sharpens():
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
    expected = 0.0
    with torch.no_grad():
        for quantizer in model:
            options, rule = quantizer.spec.options, quantizer.spec.rule
            if rule == "pact":
                quantizer.alpha.mul_(1.3)
                expected += options.get("alpha_decay", 2e-4) / 2 * quantizer.alpha.double().item() ** 2
            if rule == "learned_bits":
                quantizer.bits.sub_(0.3)
                elements = 6 * 8 * 9 if quantizer.role == "weight" else 8 * 9  # of a weight all, of one sample
                width = round(quantizer.bits.item())
                expected += options.get("cost", 0.1) * 1e-6 * elements * width
    total = qat.penalty(model)
    assert total.shape == () and total.item() == pytest.approx(expected, rel=1e-5)
    total.backward()
    for quantizer in model:
        if quantizer.spec.rule == "learned_bits" and quantizer.spec.options.get("cost", 0.1):
            elements = 6 * 8 * 9 if quantizer.role == "weight" else 8 * 9
            assert quantizer.bits.grad.item() == pytest.approx(
                quantizer.spec.options.get("cost", 0.1) * 1e-6 * elements, rel=1e-5
            )
        elif quantizer.spec.rule == "pact" and quantizer.spec.options.get("alpha_decay", 2e-4):
            decay = quantizer.spec.options.get("alpha_decay", 2e-4)
            assert quantizer.alpha.grad.item() == pytest.approx(decay * quantizer.alpha.item(), rel=1e-5)
        else:
            assert all(parameter.grad is None for parameter in quantizer.parameters())
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
