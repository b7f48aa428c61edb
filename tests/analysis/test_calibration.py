"""`calibrate`: the batches it accepts, the state it does not change, repeatability, and equal ranges on all ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qat
from qat import QuantLinear, calibrate
from qat.quantizer import create_quantizer
from qat.ranges import initial_range, scale_and_zero_point
from qat.spec import QuantSpec
from tests.references import reference
from tests.references.rule_specs import plain
from tests.runs.rule_training import same_state as same
from tests.runs.rule_training import state_of as ranges
from tests.runs.tiny_training import on_ranks

AFFINE = plain(signed=False, symmetric=False)
INITS = ("minmax", "percentile", "mse", "lsq")


class Net(nn.Module):
    """Two activation quantizers around a linear layer, one weight quantizer, and a record of every call."""

    def __init__(self, spec: QuantSpec = AFFINE) -> None:
        super().__init__()
        self.first = create_quantizer(spec)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.weight = create_quantizer(plain(bits=4), "weight")
        self.last = create_quantizer(spec)
        self.calls: list[tuple[bool, bool, bool, bool]] = []

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.calls.append((self.training, self.norm.training, self.dropout.training, torch.is_grad_enabled()))
        x = self.first(x)
        return self.last(self.dropout(x) * 10 if y is None else x + y)


def batches(count: int = 3, size: int = 8, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 4, generator=generator) * (i + 1) for i in range(count)]


def refusal_of(model: nn.Module, given: Any) -> str:
    with pytest.raises(ValueError) as refusal:
        calibrate(model, given)
    return str(refusal.value)


def test_minmax_covers_all_batches_and_activations_pass_unquantized():
    model = Net()
    calibrate(model, batches())
    everything = torch.cat(batches()).double().numpy().ravel()
    for quantizer, factor in ((model.first, 1), (model.last, 10)):
        scale, zero = reference.grid_of(*reference.minmax(everything * factor), 0, 255, symmetric=False)
        assert quantizer.scale.item() == pytest.approx(scale, rel=1e-6) and quantizer.zero_point.item() == zero
        assert quantizer.is_calibrated and bool(quantizer.calibrated)
    model(batches()[0])  # and no warning


@pytest.mark.parametrize("init", INITS)
def test_the_range_is_the_one_that_init_finds_for_the_values_seen(init):
    """With few values the observer keeps them all, so the range is that of the tensor itself."""
    spec = plain(bits=4, init=init, percentile=90.0)
    model = nn.Sequential(create_quantizer(spec))
    calibrate(model, batches())
    expected, _ = scale_and_zero_point(*initial_range(torch.cat(batches()).reshape(1, -1), spec), spec)
    assert model[0].scale.item() == expected.item()


def test_one_outlier_a_batch_does_not_fill_the_tail_of_a_percentile():
    """8 values of 3.2 million are 30; the 99.995 % percentile is near 3.9, and so must be the range of the sample."""
    generator = torch.Generator().manual_seed(2)
    big = [torch.randn(400_000, generator=generator) for _ in range(8)]
    for batch in big:
        batch[5] = 30.0
    model = nn.Sequential(create_quantizer(plain(init="percentile", percentile=99.995)))
    calibrate(model, big)
    assert 3.5 < model[0].scale.item() * 127 < 5.0


def test_tensors_sequences_and_mappings_are_accepted():
    labels = torch.zeros(8, dtype=torch.long)
    forms: dict[str, Any] = {
        "tensors": batches(),
        "generator": (batch for batch in batches()),
        "pairs": [(batch, labels) for batch in batches()],
        "lists": [[batch, labels, "ignored"] for batch in batches()],
        "mappings": [{"x": batch} for batch in batches()],
    }
    found = {}
    for name, form in forms.items():
        model = Net()
        calibrate(model, form)
        assert len(model.calls) == 3
        found[name] = ranges(model)
    assert all(same(state, found["tensors"]) for state in found.values())
    model = Net()
    calibrate(model, [{"x": torch.ones(2, 4), "y": torch.full((2, 4), 2.0)}])
    assert model.last.scale.item() == pytest.approx(3 / 255)


def test_a_limit_is_how_many_batches_are_read():
    model, expected, read = Net(), Net(), []
    stream = (read.append(batch) or batch for batch in batches(150))
    calibrate(model, stream, limit=2)
    calibrate(expected, batches(150)[:2])
    assert len(read) == 2 and same(ranges(model), ranges(expected))


def test_modes_are_evaluation_inside_and_restored_outside():
    model = Net().train()
    model.norm.eval()  # frozen by the user
    running = ranges(model.norm)
    calibrate(model, batches())
    assert set(model.calls) == {(False, False, False, False)}
    assert (model.training, model.norm.training, model.dropout.training) == (True, False, True)
    assert same(running, ranges(model.norm))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.first.parameters())


def stale_layer() -> nn.Module:
    """A layer whose weights became 8 times larger behind the back of their range, and a quantizer of its result."""
    torch.manual_seed(0)
    layer = QuantLinear(4, 4, weight_spec=plain(bits=4))
    with torch.no_grad():
        layer.weight.mul_(8)
    return nn.Sequential(layer, create_quantizer(AFFINE))


def test_activations_are_observed_behind_the_new_ranges_of_weights():
    model, again = stale_layer(), stale_layer()
    calibrate(model, batches())
    for _ in range(2):
        calibrate(again, batches())
    assert same(ranges(model), ranges(again))


def test_a_failing_calibration_leaves_every_range_as_it_was():
    model = stale_layer()
    calibrate(model, batches())
    with torch.no_grad():
        model[0].weight.mul_(2)
    before = ranges(model.train())
    refusal_of(model, [batches()[0], torch.full((2, 4), float("nan"))])
    assert same(before, ranges(model)) and model[1].is_calibrated and model.training
    assert len(model[1](torch.linspace(-1, 1, 5000)).unique()) <= 256  # quantizing again, not observing


@pytest.mark.parametrize("init", INITS)
def test_the_same_batches_give_the_same_ranges_and_no_random_number_is_drawn(init):
    spec = plain(bits=4, init=init, percentile=99.0)
    big = [torch.randn(20, 4000, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)]
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
        model = nn.Sequential(create_quantizer(spec), create_quantizer(spec))
        calibrate(model, big)
        assert torch.equal(torch.get_rng_state(), before) and (np.random.get_state()[1] == numpys).all()
        found.append(ranges(model))
    assert same(*found)
    assert found[0]["0.scale"] == found[0]["1.scale"]


def test_models_without_quantizers_and_calls_without_batches_are_refused():
    sentence = "calibrate: the model has no quantized layer and no activation quantizer; call prepare first"
    assert refusal_of(nn.Linear(2, 2), batches()) == sentence
    assert refusal_of(nn.Sequential(create_quantizer(QuantSpec(), "weight")), batches()) == sentence
    sentence = "calibrate: batches is empty; at least one batch is needed to find the ranges"
    assert refusal_of(Net(), []) == sentence
    assert refusal_of(Net(), iter(())) == sentence


BLAMED = {
    "quantizer 'last'": lambda x, layer: layer.bias.data,
    "quantizer 'first'": lambda x, layer: x,
    "weight of 'layer'": lambda x, layer: layer.weight.data,
}


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", BLAMED)
def test_a_bad_number_is_blamed_on_the_first_that_saw_it_and_leaves_no_range(name, bad):
    """The quantizers are registered in another order than they run in."""
    last, layer, first = create_quantizer(AFFINE), QuantLinear(4, 4), create_quantizer(AFFINE)
    model = nn.ModuleDict({"last": last, "layer": layer, "first": first})
    model.forward = lambda x: last(layer(first(x)))
    x, whole = batches()[0], ranges(layer)
    BLAMED[name](x, layer).view(-1)[2] = bad
    said = refusal_of(model, [batches()[0], x])
    assert said == f"calibrate: {name}: initial_range: the values hold NaN or infinity"
    assert not first.is_calibrated and not last.is_calibrated
    layer.load_state_dict(whole)
    calibrate(model, batches())
    assert first.is_calibrated and last.is_calibrated


def test_a_layer_without_a_grid_for_its_input_gets_the_range_of_its_weight():
    layer = QuantLinear(4, 4, activation_spec=None)
    before = layer.weight_quantizer.scale.clone()
    layer.weight.data.mul_(8)
    calibrate(layer, batches())
    assert torch.equal(layer.weight_quantizer.scale, before * 8)


def test_quantizers_that_see_nothing_are_named():
    model = Net()
    model.unused = create_quantizer(AFFINE)
    sentence = "calibrate: quantizer {!r} saw no values; is its part of the model ever run?"
    assert refusal_of(model, batches()) == sentence.format("unused")
    empty = nn.Sequential(create_quantizer(AFFINE))
    assert refusal_of(empty, [torch.empty(0, 4)]) == sentence.format("0")


def rank_batches(rank: int) -> list[Tensor]:
    return [batch * (1 + 9 * rank) + rank for batch in batches(2, seed=rank)]


def calibrated(init: Any, given: list[Tensor]) -> dict[str, Tensor]:
    model = Net(plain(bits=4, symmetric=False, init=init, percentile=99.0))
    calibrate(model, given)
    return ranges(model)


def calibrate_on_a_rank(rank: int) -> dict[str, Any]:
    """One of two processes: ranges for every `init` on its own batches, then the outcome of a mistake on one side."""
    found: dict[str, Any] = {}
    for init in INITS:
        found[init] = calibrated(init, rank_batches(rank))
    found["nan"] = outcome([torch.full((2, 4), float("nan") if rank else 1.0)])
    found["empty"] = outcome([] if rank else batches())
    return found


def outcome(given: list[Tensor]) -> str:
    model = Net()
    try:
        calibrate(model, given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"scale {model.first.scale.item()}"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(calibrate_on_a_rank, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("init", INITS)
def test_two_ranks_with_different_batches_end_with_the_ranges_of_all_of_them(two_ranks, init):
    assert same(two_ranks[0][init], two_ranks[1][init])
    assert same(two_ranks[0][init], calibrated(init, rank_batches(0) + rank_batches(1)))
    assert not same(two_ranks[0][init], calibrated(init, rank_batches(0)))


def test_a_nan_on_one_rank_is_reported_on_both(two_ranks):
    sentence = "ValueError: calibrate: quantizer 'first': initial_range: the values hold NaN or infinity"
    assert [found["nan"] for found in two_ranks] == [sentence, sentence]


def test_a_rank_without_batches_does_not_leave_the_other_waiting(two_ranks):
    """Either both calibrate with the batches of one, or both say what is missing; neither loses the connection."""
    first, second = (found["empty"] for found in two_ranks)
    assert first == second
    assert first.startswith(("scale ", "ValueError: calibrate: "))


def test_batch_norms_that_have_seen_too_few_batches_are_named_with_the_cure(caplog):
    """Points 24, 50 and 92: behind them ranges of 1e-13 follow, gradients of 1e7, and NaN."""
    model = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), None, torch.randn(2, 3, 4, 4))
    x, norm = torch.randn(8, 3, 4, 4), model.get_submodule("1")
    for batches in (0, 4, 43, 44, 0):
        norm.reset_running_stats()
        for _ in range(batches):
            model.train()(x)
        caplog.clear()
        qat.calibrate(model, [x])
        said = (
            "calibrate: 1 BatchNorms have seen too few batches, or none, and their statistics are not the data's (1);"
            " steps behind these ranges may diverge; train the float model longer, or call"
            " qat.reestimate_batch_norm(model, batches)"
        )
        assert (said in caplog.messages) == (batches < 44)
    assert qat.reestimate_batch_norm(model, [x + 9]) == 1
    caplog.clear()
    qat.calibrate(model, [x])
    assert not any("BatchNorms" in each for each in caplog.messages)
