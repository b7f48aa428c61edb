"""Running statistics that are computed anew, frozen, or those of all ranks (tests/ranks trains with these)."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import qat
from tests.references.prepared_case import Plain


def model_and_batches() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)
    )
    return model, [torch.randn(6, 3, 9, 9) * 3 + 1 for _ in range(4)]


def test_they_are_the_averages_of_the_batches() -> None:
    model, batches = model_and_batches()
    model[1].momentum = 0.01
    assert qat.reestimate_batch_norm(model, batches) == 2
    of_first = [model[0](x).detach().double().numpy() for x in batches]
    mean = np.mean([y.mean((0, 2, 3)) for y in of_first], axis=0)
    variance = np.mean([y.var((0, 2, 3), ddof=1) for y in of_first], axis=0)
    np.testing.assert_allclose(model[1].running_mean.numpy(), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model[1].running_var.numpy(), variance, rtol=1e-5)
    assert model[1].momentum == 0.01 and all(module.training for module in model.modules())


def test_a_prepared_model_keeps_its_ranges_and_parameters() -> None:
    float_model, batches = model_and_batches()
    recipe = qat.QuantRecipe(activation={"rule": "ema", "signed": False, "symmetric": False})
    model = qat.prepare(float_model.eval(), recipe, batches[0])
    qat.calibrate(model, batches)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert qat.reestimate_batch_norm(model, batches) == 2
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(
        name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked") for name in changed
    )
    # On the grids of the quantizers, the statistics are those of the quantized convolutions.
    qat.reestimate_batch_norm(float_model, batches)
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    torch.testing.assert_close(norms[0].running_var, float_model[1].running_var, rtol=0.05, atol=0)


def test_what_the_batches_do_not_reach_stays_as_it_was() -> None:
    none = nn.BatchNorm1d(2, track_running_stats=False)
    model = Plain(lambda self, x: self.used(x), used=nn.BatchNorm1d(2), unused=nn.BatchNorm1d(2), none=none)
    model.unused.running_mean.fill_(7.0)
    assert qat.reestimate_batch_norm(model, [(torch.randn(5, 2), torch.zeros(5))]) == 1
    assert model.unused.running_mean.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("batches", [[], [torch.randn(4, 3), torch.randn(4, 5)]])
def test_after_an_error_they_are_as_before(batches: list[torch.Tensor]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=0.3))
    model(torch.randn(8, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, RuntimeError)):
        qat.reestimate_batch_norm(model, batches)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model[1].momentum == 0.3


def test_frozen_statistics_survive_train_copies_and_pickles() -> None:
    model, batches = model_and_batches()
    model[1](torch.randn(4, 8, 3, 3))
    expected = copy.deepcopy(model).eval()
    assert qat.freeze_batch_norm(model) == qat.freeze_batch_norm(model) == 2
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.eval().train()
        assert [module.training for module in each] == [True, False, True, True, True, False]
        y = each[:3](batches[0])
        assert torch.equal(y, expected[:3](batches[0]))
        y.sum().backward()
        assert each[1].weight.grad is not None and each[1].running_mean.equal(expected[1].running_mean)
        assert qat.reestimate_batch_norm(each, batches) == 0
        assert each[1].running_mean.equal(expected[1].running_mean)
    assert model.state_dict().keys() == expected.state_dict().keys()

    assert qat.freeze_batch_norm(model, False) == 2
    assert model[1].training and not model.eval()[1].training and model.train()[1].training
    model[0:2](batches[0])
    assert not model[1].running_mean.equal(expected[1].running_mean)


def test_norms_of_all_ranks_fold_into_the_file(tmp_path: Path) -> None:
    float_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    x = torch.randn(8, 3, 8, 8)
    model = qat.prepare(float_model, example_inputs=x)
    qat.calibrate(model, [x])
    plain = model(x)
    qat.sync_batch_norm(model)
    assert torch.equal(model(x), plain)
    qat.export_onnx(model, tmp_path / "model.onnx", x)
    assert qat.verify_onnx(tmp_path / "model.onnx", model, [x]).agreement == 1.0
