"""Parameter groups, optimizers and schedules against their formulas."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from qat import QuantLinear
from qat.quantizer import create_quantizer
from qat.spec import QuantSpec
from qat.training.config.stages import QATStageConfig, StageConfig
from qat.training.loop.optimizer import TwoOptimizers, build_optimizer, build_schedule
from tests.runs.tiny_training import tiny_model, user_error


def test_nothing_to_train_is_a_sentence() -> None:
    said = user_error(build_optimizer, nn.Linear(2, 2).requires_grad_(False), StageConfig())
    assert said == "model: it has no trainable parameter; set epochs to 0 or unfreeze some"


@pytest.mark.parametrize(("stage", "rates"), [
    (QATStageConfig(lr=0.2), {"quantizers_8_bits": 0.02, "quantizers_3_bits": 0.2}),
    (QATStageConfig(lr=0.2, quantizer_lr_factor=0.5), {"quantizers": 0.1}),
    (QATStageConfig(optimizer="adamw", quantizer_optimizer="sgd", quantizer_lr=0.3), {"quantizers": 0.3}),
    (StageConfig(lr=0.2), {"quantizers": 0.2}),
])  # fmt: skip
def test_scales_learn_at_the_rate_of_their_bits_or_of_the_config(stage: StageConfig, rates: dict[str, float]) -> None:
    model = nn.Sequential(tiny_model(), create_quantizer(QuantSpec(bits=3)))
    optimizer = build_optimizer(model, stage)
    build_schedule(optimizer, stage, steps_per_epoch=4)
    assert {g["name"]: g["lr"] for g in optimizer.param_groups[3:]} == pytest.approx(rates)


@pytest.mark.parametrize(("weights", "scales"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_scales_have_an_optimizer_of_their_own(weights: str, scales: str) -> None:
    """Each trains as it would alone, and one schedule moves both rates."""
    fields: dict[str, Any] = {"epochs": 1, "lr": 0.1, "quantizer_lr": 0.003, "quantizer_weight_decay": 0.2}
    trained = {}
    for kinds in ((weights, scales), (weights, weights), (scales, scales)):
        torch.manual_seed(0)
        layer = QuantLinear(3, 2)
        stage = QATStageConfig(optimizer=kinds[0], quantizer_optimizer=kinds[1], **fields)
        optimizer = build_optimizer(layer, stage)
        assert isinstance(optimizer, TwoOptimizers) == (kinds[0] != kinds[1])
        assert all(g["nesterov"] and g["momentum"] == 0.9 for g in optimizer.param_groups if "nesterov" in g)
        schedule = build_schedule(optimizer, stage, steps_per_epoch=4)
        for step in range(2):
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 + step)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.05, 0.0015])
        assert [g["weight_decay"] for g in optimizer.param_groups] == [1e-4, 0.0, 0.2]
        trained[kinds] = {name: value.detach().clone() for name, value in layer.named_parameters()}
    for name, value in trained[weights, scales].items():
        alone = scales if "quantizer" in name else weights
        assert torch.equal(value, trained[alone, alone][name])
    assert not torch.equal(trained[weights, weights]["weight"], trained[scales, scales]["weight"])


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_a_gradient_scaler_unscales_for_both_and_skips_both(factor: float) -> None:
    parameters = [nn.Parameter(torch.tensor(1.0)) for _ in range(2)]
    both = TwoOptimizers([torch.optim.SGD(parameters[:1], 0.1, fused=True), torch.optim.SGD(parameters[1:], 0.01)])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(parameters[0] * factor + parameters[1]).backward()  # type: ignore[no-untyped-call]
    scaler.step(both)
    scaler.update()
    expected = [0.9, 0.99] if factor == 1 else [1.0, 1.0]
    assert [parameter.item() for parameter in parameters] == pytest.approx(expected)
    assert scaler.get_scale() == (1024 if factor == 1 else 512)


@pytest.mark.parametrize(("stage", "factors"), [
    (StageConfig(epochs=1, schedule="constant"), [1, 1, 1, 1, 1]),
    (StageConfig(epochs=1, schedule="cosine"), [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0]),
    # 1.5 warm-up steps of 4: the cosine starts between two steps.
    (StageConfig(epochs=1, warmup_epochs=0.375),
     [0.01, 0.67, *((1 + math.cos(math.pi * s / 2.5)) / 2 for s in (0.5, 1.5)), 0]),
    (StageConfig(epochs=1, warmup_epochs=0.5, schedule="constant"), [0.01, 0.505, 1, 1, 1]),
    (StageConfig(epochs=1, warmup_epochs=1), [0.01, 0.2575, 0.505, 0.7525, 1]),
])  # fmt: skip
def test_schedule_is_exact_at_every_step(stage: StageConfig, factors: list[float]) -> None:
    model = tiny_model()
    stage = QATStageConfig(**{**stage.model_dump(), "lr": 0.3, "quantizer_lr_factor": 0.1})
    optimizer = build_optimizer(model, stage)
    schedule = build_schedule(optimizer, stage, steps_per_epoch=4)
    for factor in factors:
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([0.3 * factor] * 3 + [0.03 * factor], abs=1e-15)
        optimizer.step()
        schedule.step()


def test_a_first_step_that_a_gradient_scaler_skips_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    poison = [torch.full((64, 64), float("nan")) for _ in range(50)]  # what an allocator may give out again
    optimizer = build_optimizer(model, StageConfig(lr=0.1, momentum=0.9))
    del poison
    expected = copy.deepcopy(model)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0)
    for group, own in zip(optimizer.param_groups, plain.param_groups * 2, strict=False):
        group["lr"], group["weight_decay"] = own["lr"], 0
    scaler = torch.amp.GradScaler("cpu")
    for factor in (float("inf"), 1.0, 1.0):
        scaler.scale(model.weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if factor == 1.0:
            expected.weight.sum().backward()
            plain.step()
            plain.zero_grad()
    assert torch.allclose(model.weight, expected.weight)
