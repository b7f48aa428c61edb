"""BatchNorm over all ranks: two processes with half of each batch train as one with the whole."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qat
from tests.runs.tiny_training import on_ranks

STEPS, BATCH = 20, 16


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 8, 8, generator=generator).double(), torch.randint(4, (BATCH,), generator=generator)


def trained(rank: int = 0, count: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    net = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).double()
    qat.reestimate_batch_norm(net, [batch(step)[0] for step in range(rank, 8, count)])
    recipe = qat.QuantRecipe(weight={"bits": 4}, activation={"bits": 4, "grad_scale": "batch"})
    model = qat.prepare(net, recipe, batch(0)[0][:2]).double()
    qat.calibrate(model, [batch(0)[0]] if rank == 0 else [])  # ranges of rank 0's batches are those of all
    assert qat.sync_batch_norm(model) == 2
    parallel = DistributedDataParallel(model.train()) if count > 1 else model.train()
    optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.01, weight_decay=0.0), momentum=0.9)
    mine = slice(rank * BATCH // count, (rank + 1) * BATCH // count)
    for step in range(STEPS):
        images, labels = batch(step)
        F.cross_entropy(parallel(images[mine]), labels[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def work(rank: int) -> dict[str, Any]:
    warnings.simplefilter("error")
    return trained(rank, 2)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(work, tmp_path_factory.mktemp("gloo"))


def test_two_ranks_train_as_one_process(ranks: list[dict[str, Any]]) -> None:
    alone = trained()
    for name, value in alone.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], value, rtol=1e-6, atol=1e-9, msg=name)


def test_it_folds_into_the_file(tmp_path: Path) -> None:
    float_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    x = torch.randn(8, 3, 8, 8)
    model = qat.prepare(float_model, example_inputs=x)
    qat.calibrate(model, [x])
    plain = model(x)
    qat.sync_batch_norm(model)
    assert torch.equal(model(x), plain)
    qat.export_onnx(model, tmp_path / "model.onnx", x)
    assert qat.verify_onnx(tmp_path / "model.onnx", model, [x]).agreement == 1.0
