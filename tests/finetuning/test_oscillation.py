"""Oscillations: against the published formulas element by element, what stays frozen, and runs that are resumed."""

import functools
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.finetuning import Oscillations
from tests.references.prepared_case import Plain
from tests.runs import small_run
from tests.runs.tiny_training import curves

KEYS = ("integer", "direction", "frequency", "average", "frozen")
GRIDS: dict[str, dict[str, Any]] = {
    "channel": {"bits": 3},
    "tensor": {"bits": 2, "granularity": "tensor", "narrow_range": False},
    "group": {"bits": 3, "granularity": "group", "group_size": 4},
    "power_of_two": {"bits": 3, "rule": "power_of_two"},
    "dsq": {"bits": 3, "rule": "dsq"},
}


class Reference:
    """One weight after another, in double precision, as the paper's algorithm 1 says."""

    def __init__(self, codes: np.ndarray, m: float) -> None:
        self.m, self.shape = m, codes.shape
        self.integer = [float(q) for q in codes.flat]
        self.average, self.direction = list(self.integer), [0.0] * codes.size
        self.frequency, self.frozen = [0.0] * codes.size, [False] * codes.size

    def update(self, codes: np.ndarray, threshold: float | None) -> None:
        for i, q in enumerate(codes.flat):
            if self.frozen[i]:
                q = self.integer[i]
            change = q - self.integer[i]
            oscillates = change != 0 and np.sign(change) == -self.direction[i]
            if change != 0:
                self.direction[i] = float(np.sign(change))
            self.frequency[i] = self.m * oscillates + (1 - self.m) * self.frequency[i]
            self.average[i] = self.m * q + (1 - self.m) * self.average[i]
            self.integer[i] = float(q)
            if threshold is not None and not self.frozen[i] and self.frequency[i] > threshold:
                self.frozen[i], self.integer[i] = True, float(np.round(self.average[i]))


def two_layers(**weight: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2))
    model = qat.prepare(layers, qat.QuantRecipe(weight=weight), torch.randn(2, 4, 6, 6))
    qat.calibrate(model, [torch.randn(16, 4, 6, 6)])
    return model


def integers(layer: Any) -> np.ndarray:
    """By numbers alone: a weight's integers in the layout of its scales."""
    quantizer = layer.weight_quantizer
    rows = layer.channels_first(layer.weight.detach()).numpy().astype(np.float32)
    size = quantizer.spec.group_size
    if size:
        rows = rows.reshape(rows.shape[0], -1, size, *rows.shape[2:])
    scale = quantizer.grid()[0].detach().numpy()
    return np.asarray(np.clip(np.round(rows / scale), quantizer.spec.qmin, quantizer.spec.qmax))


@pytest.mark.parametrize("grid", GRIDS)
def test_counting_and_freezing_follow_the_published_algorithm(grid: str) -> None:
    model = two_layers(**GRIDS[grid])
    layers: list[Any] = [model.get_submodule(name) for name in ("0", "2")]
    oscillations = Oscillations(model, freeze=0.15, freeze_from=0.4, after=0.25, momentum=0.1)
    assert list(oscillations.weights) == ["0", "2"] and not oscillations.left_out
    references = [Reference(integers(layer), 0.1) for layer in layers]
    generator, steps = torch.Generator().manual_seed(1), 24
    for step in range(steps):
        for layer in layers:  # an optimizer's step: of the weights, and of the scales too
            with torch.no_grad():
                grain = layer.weight_quantizer.grid()[0].mean()
                layer.weight += 0.35 * grain * torch.randn(layer.weight.shape, generator=generator)
                layer.weight_quantizer.scale *= 1 + 0.01 * torch.randn((), generator=generator)
        codes = [integers(layer) for layer in layers]
        progress = step / (steps - 1)
        threshold = 0.15 + 0.25 * (1 + math.cos(math.pi * (progress - 0.25) / 0.75)) / 2 if progress >= 0.25 else None
        oscillations.update(progress)
        for reference, each in zip(references, codes, strict=True):
            reference.update(each, threshold)
        for key in KEYS:
            expected = np.concatenate([np.asarray(getattr(reference, key), float) for reference in references])
            np.testing.assert_allclose(getattr(oscillations, key).numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=key)
        for reference, layer in zip(references, layers, strict=True):
            frozen = np.reshape(reference.frozen, reference.shape)
            assert np.array_equal(integers(layer)[frozen], np.reshape(reference.integer, reference.shape)[frozen])
    frozen = oscillations.frozen.float().mean()
    assert 0.1 < frozen < 0.9
    count = oscillations.count()
    assert count.weights == 2 * 8 * 4 * 9 - 8 * 4 * 5 and count.frozen == oscillations.frozen.sum()
    expected = sum(f > 0.005 and not held for r in references for f, held in zip(r.frequency, r.frozen, strict=True))
    assert count.oscillating == expected > 0
    assert [each.weights for each in oscillations.by_layer().values()] == [8 * 4 * 9, 8 * 4 * 4]


@pytest.mark.parametrize("grid", ["channel", "tensor", "group"])
def test_dampening_draws_weights_to_their_integers_and_leaves_scales_alone(grid: str) -> None:
    model = two_layers(**GRIDS[grid])
    layer: Any = model.get_submodule("0")
    with torch.no_grad():
        layer.weight_quantizer.scale *= 0.7  # some weights are clipped
    oscillations = Oscillations(model, dampen=0.1, after=0.25)
    assert oscillations.penalty(0.2).item() == 0
    penalty = oscillations.penalty(0.5)
    penalty.backward()  # type: ignore[no-untyped-call]
    strength, total = 0.1 * (1 - math.cos(math.pi / 3)) / 2, 0.0
    for name in ("0", "2"):
        each: Any = model.get_submodule(name)
        rows = each.channels_first(each.weight.detach()).numpy().astype(float)
        q, scale = integers(each), each.weight_quantizer.grid()[0].detach().numpy().astype(float)
        grouped = rows.reshape(q.shape)
        spec = each.weight_quantizer.spec
        distance = np.clip(grouped, spec.qmin * scale, spec.qmax * scale) - q * scale
        total += (distance**2).sum()
        found = each.channels_first(each.weight.grad).numpy().reshape(q.shape)
        np.testing.assert_allclose(found, 2 * strength * distance, rtol=1e-4, atol=1e-7)
        grad = each.weight_quantizer.scale.grad
        assert grad is None or not grad.any()
        assert name == "2" or (np.abs(distance) < 1e-6).sum() > 10  # the clipped ones have no gradient
    assert penalty.item() == pytest.approx(strength * total, rel=1e-4) and total > 0


def network() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 8, 8), torch.randint(4, (64,))
    first = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    second = [nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    layers = nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    model = qat.prepare(layers, qat.QuantRecipe({"bits": 3}, {"bits": 4}), images[:2])
    qat.calibrate(model, [images])
    return model, images, labels


@functools.cache
def trained(steps: int, hold: bool = True) -> tuple[nn.Module, Oscillations, list[tuple[Tensor, Tensor]]]:
    """A model after some steps with momentum and decay, with (frozen, integers) after each."""
    model, images, labels = network()
    model.train()
    groups = qat.parameter_groups(model, lr=0.05, weight_decay=0.01)
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    oscillations = Oscillations(model, freeze=0.02 if hold else None, freeze_from=0.1, dampen=0.01, momentum=0.05)
    seen = []
    for step in range(steps):
        progress = step / (steps - 1)
        (F.cross_entropy(model(images), labels) + oscillations.penalty(progress)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        oscillations.update(progress)
        codes = torch.cat([each.codes().flatten() for each in oscillations.weights.values()])
        seen.append((oscillations.frozen.clone(), codes))
    return model, oscillations, seen


def test_what_is_frozen_stays_and_is_exported() -> None:
    model, oscillations, seen = trained(40)
    assert "on codes" in qat.explain(model)
    assert seen[9][0].sum() == 0  # off for the first quarter
    count = oscillations.count()
    assert 20 < count.frozen < count.weights / 2
    for (frozen, codes), (still, later) in itertools.pairwise(seen):
        assert bool((still | ~frozen).all()) and torch.equal(codes[frozen], later[frozen])
    exported = qat.integer_weights(model.eval())
    found = torch.cat([torch.from_numpy(exported[name].weight).flatten() for name in oscillations.weights])
    signs = []  # a negative gamma of BatchNorm turns a channel's integers around
    for name, norm in (("0", "1"), ("3", "4"), ("8", None)):
        weight: Any = model.get_submodule(name).weight
        gamma: Any = model.get_submodule(norm).weight if norm else torch.ones(len(weight))
        signs.append(torch.sign(gamma.detach()).repeat_interleave(weight[0].numel()))
    assert torch.equal((found * torch.cat(signs))[oscillations.frozen], oscillations.integer[oscillations.frozen])


def test_switched_off_weights_are_left_alone() -> None:
    model = two_layers(bits=3)
    oscillations = Oscillations(model, freeze=0.5, freeze_from=0.5, after=0.0, dampen=1.0, momentum=1.0)
    weight: Any = model.get_submodule("0").weight
    with torch.no_grad():
        weight.neg_()
        oscillations.update(1.0)
        weight.neg_()
        oscillations.update(1.0)
        assert oscillations.count().frozen > 100
        before = oscillations.integer.clone()
        with qat.disable_fake_quant(model):
            weight.neg_()
            kept = weight.clone()
            oscillations.update(1.0)
            assert oscillations.penalty(1.0).item() == 0
        assert torch.equal(weight, kept) and torch.equal(oscillations.integer, before)
        oscillations.update(1.0)
    assert not torch.equal(weight, kept)  # what is frozen is back


def test_weights_of_attention_and_recurrent_layers_are_found() -> None:
    layers = {"attention": nn.MultiheadAttention(8, 2, batch_first=True), "gru": nn.GRU(8, 8)}
    net = Plain(lambda self, x: self.gru(self.attention(x, x, x, need_weights=False)[0])[0], **layers)
    model = qat.prepare(net, qat.QuantRecipe({"bits": 3}), torch.randn(2, 5, 8))
    qat.calibrate(model, [torch.randn(4, 5, 8)])
    oscillations = Oscillations(model, freeze=0.5, freeze_from=0.5, after=0.0, momentum=1.0)
    assert not oscillations.left_out and oscillations.count().weights == 4 * 64 + 2 * 3 * 64
    parameters = [p for name, p in model.named_parameters() if "quantizer" not in name and p.dim() == 2]
    before = oscillations.integer.clone()
    with torch.no_grad():
        for sign in (1, -1, 1):  # each weight there and back
            for p in parameters:
                p.add_(sign * 0.3)
            oscillations.update(1.0)
    held = oscillations.frozen
    assert held.float().mean() > 0.8 and torch.equal(oscillations.integer[held], before[held])


def test_what_has_no_integers_is_left_out_or_refused() -> None:
    recipe = qat.QuantRecipe(
        {"bits": 4}, overrides={"2": {"weight": {"rule": "dorefa"}}, "4": {"weight": {"rule": "apot"}}}
    )
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    oscillations = Oscillations(qat.prepare(layers, recipe, torch.randn(2, 4)))
    assert list(oscillations.weights) == ["0"]
    assert oscillations.left_out == {
        "2": "has the rule 'dorefa', whose integers are not those of weight / scale",
        "4": "has the rule 'apot', whose values lie on no integer grid",
    }
    for rule, reason in {"minmax": "range follows the weights", "learned_bits": "integers are not those of"}.items():
        with pytest.raises(
            ValueError, match=f"on an integer grid of few bits: the weight of '' has the rule .{rule}., whose {reason}"
        ):
            Oscillations(qat.QuantLinear(4, 2, weight_spec=qat.QuantSpec(rule=rule)))
    assert Oscillations(qat.QuantLinear(4, 2), most_bits=8).count().weights == 8
    with pytest.raises(ValueError, match="few bits: the weight of '' has 8 bits, more than most_bits=4"):
        Oscillations(qat.QuantLinear(4, 2))
    with pytest.raises(ValueError, match="no weight on an integer grid of few bits: call prepare"):
        Oscillations(nn.Linear(4, 2))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert Oscillations(qat.prepare(tied, qat.QuantRecipe({"bits": 4}), torch.randn(2, 4))).left_out == {
        "1": "is that of '0' too, on another grid"
    }


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="Oscillations: freeze must be above 0 and at most 1, or None, got 0"):
        Oscillations(qat.QuantLinear(4, 2), freeze=0.0)
    with pytest.raises(ValueError, match=r"Oscillations: freeze_from must be from freeze, 0.2, to 1, got 0.1"):
        Oscillations(qat.QuantLinear(4, 2), freeze=0.2)
    with pytest.raises(ValueError, match="progress must be from 0 to 1, got 2"):
        Oscillations(qat.QuantLinear(4, 2, weight_spec=qat.QuantSpec(bits=4))).update(2)


def test_a_state_goes_on_in_no_other_model() -> None:
    _, oscillations, _ = trained(40)
    saved = oscillations.state_dict()
    with pytest.raises(ValueError, match="the state is of another model; they differ in '0'"):
        Oscillations(two_layers(bits=3)).load_state_dict(saved)
    with pytest.raises(ValueError, match="the state has no 'average'; give what state_dict"):
        oscillations.load_state_dict({})


FREEZING = "qat.oscillation={freeze: 0.1, freeze_from: 0.2, dampen: 0.01, momentum: 0.2}"


def start(*arguments: str) -> int:
    return small_run.start("qat.lr=0.1", "qat.epochs=3", "quantization.weight.bits=2", *arguments)


def test_a_run_says_how_many_oscillate_and_counting_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("run_dir=plain", "qat.lr=1.0") == 0
    assert "oscillating" not in capsys.readouterr().out
    overrides = "quantization.overrides={'0': {weight: {rule: dorefa}}}"
    assert start("run_dir=counted", "qat.lr=1.0", "qat.oscillation={}", "float_finetune=true") == 0
    assert "; oscillating " in capsys.readouterr().out
    plain, counted = (
        torch.load(folder / name / "last.pt", weights_only=True)["model"] for name in ("plain", "counted")
    )
    torch.testing.assert_close(counted, plain, rtol=0, atol=0)
    assert {"qat/train/oscillating", "qat/train/quantizer_oscillating/0.weight_quantizer"} <= curves(
        folder / "counted"
    ).keys()
    # What is evaluated and saved are averages, with scales that are averages too; those of frozen weights are integers.
    assert start("run_dir=frozen", FREEZING, "qat.progressive=[{bits: 4}]", overrides, "qat.ema_decay=0.9") == 0
    said = capsys.readouterr().out
    assert ", frozen weights " in said
    known = torch.load(folder / "frozen" / "last.pt", weights_only=True)["state"]["aids"]["oscillations"]
    loaded = Oscillations(qat.load(folder / "frozen", sys.modules["tinymodels"].tiny(10)))
    assert list(loaded.weights) == list(known["layers"]) and known["frozen"].any()
    assert torch.equal(loaded.integer[known["frozen"]], known["integer"][known["frozen"]])


def test_a_model_without_integers_is_refused_before_any_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = small_run.refusal(capsys, "qat.oscillation={}", "quantization.weight.rule=dorefa")
    assert "qat.oscillation: Oscillations: the model has no weight on an integer grid" in said
