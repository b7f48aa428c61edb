"""Every rule under DistributedDataParallel: two processes with different data end with the same model."""

import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qat
from qat.spec import QuantSpec
from tests.references import rule_specs as specs
from tests.runs.rule_training import Layers, images_for
from tests.runs.tiny_training import on_ranks

STEPS = 2


def inputs(activation_spec: QuantSpec, rank: int, step: int) -> Tensor:
    """A different batch for each rank, with larger values for higher ranks."""
    return images_for(activation_spec, 10 * rank + step) * (1 + rank)


def train(weight_spec: QuantSpec, activation_spec: QuantSpec, rank: int) -> dict[str, Tensor]:
    """Calibrate and train for two steps; return the state and the gradients of the last step."""
    model = Layers(weight_spec, activation_spec)
    qat.calibrate(model, [inputs(activation_spec, rank, 9)])
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    for step in range(STEPS):
        qat.set_progress(parallel, step / STEPS)
        loss = nn.functional.cross_entropy(parallel(inputs(activation_spec, rank, step)), specs.LABELS)
        optimizer.zero_grad()
        (loss + qat.penalty(parallel)).backward()
        optimizer.step()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**{name: value.clone() for name, value in model.state_dict().items()}, **gradients}


def work(rank: int) -> dict[str, Any]:
    """One of two processes, which trains all rules in turn; a failure is saved as its traceback."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "calibrate: the rule")  # that loses much of a weight
    found: dict[str, Any] = {}
    for name, (weight_spec, activation_spec) in specs.LAYERS.items():
        try:
            found[name] = train(weight_spec, activation_spec, rank)
        except Exception:
            found[name] = traceback.format_exc()
    quantizer = specs.new("activation", specs.ACTIVATIONS["learned_bits"])
    qat.calibrate(quantizer, [specs.images()] if rank else [])
    found["one-sided calibration"] = quantizer.state_dict()
    model = Layers(specs.weight("lsq", 4, specs.HESSIAN), specs.activation("lsq", 4, specs.HESSIAN))
    qat.calibrate(model, [inputs(specs.ACTIVATIONS["lsq"], rank, 9)])
    found["update_ewgs"] = qat.update_ewgs(
        model, lambda model, x: nn.functional.cross_entropy(model(x), specs.LABELS), [specs.images(rank)]
    )
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(work, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", specs.LAYERS)
def test_two_ranks_stay_equal(ranks, name):
    first, second = (found[name] for found in ranks)
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert all(value.isfinite().all() for value in first.values())
    model = Layers(*specs.LAYERS[name])
    assert first.keys() >= {f"gradient of {key}" for key, _ in model.named_parameters()}, "every parameter is used"
    assert set(model.state_dict()) == {key for key in first if not key.startswith("gradient of ")}


@pytest.mark.parametrize("name", [name for name, (_, spec) in specs.LAYERS.items() if spec.rule in ("minmax", "ema")])
def test_observed_ranges_are_those_of_all_ranks(ranks, name):
    _, spec = specs.LAYERS[name]
    given = [[inputs(spec, rank, step) for rank in (0, 1)] for step in (9, *range(STEPS))]
    quantizer = specs.new("activation", spec)
    qat.calibrate(quantizer, given[0])
    low, high = quantizer.low.clone(), quantizer.high.clone()
    for batches in given[1:]:
        batch = torch.cat(batches)
        bottom, top = batch.amin().clamp(max=0), batch.amax().clamp(min=0)
        if spec.rule == "ema":
            momentum = spec.options.get("momentum", 0.01)
            low, high = low + momentum * (bottom - low), high + momentum * (top - high)
        else:
            low, high = torch.minimum(low, bottom), torch.maximum(high, top)
    torch.testing.assert_close(ranks[1][name]["conv.input_quantizer.low"], low)
    torch.testing.assert_close(ranks[1][name]["conv.input_quantizer.high"], high)


def test_a_rank_without_batches_calibrates_as_the_other(ranks):
    first, second = (found["one-sided calibration"] for found in ranks)
    assert first["elements"].item() == second["elements"].item() == 100, "learned bits are paid for on both"
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_update_ewgs_finds_one_delta_for_all_ranks(ranks):
    first, second = (found["update_ewgs"] for found in ranks)
    assert first == second and set(first) == {
        f"{layer}.{kind}_quantizer" for layer in ("conv", "fc") for kind in ("weight", "input")
    }
    assert max(first.values()) > 0
