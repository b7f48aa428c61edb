"""DistributedDataParallel: many ranks, each with its share of every batch, train the model of one process."""

import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qat
from tests.ranks.parallel_training import MODELS, batch, calibrate, exported, optimizer_of, prepared, train
from tests.runs.tiny_training import on_ranks

STEPS = 20
LONGER = ("vit", "learned bits")
"""Models whose files take long to export."""

DTYPES = {"float64": torch.float64, "float32": torch.float32}
FLIPPED = 0.002
"""Of a float32 model's integer weights: sums in another order move a weight that lies between two integers."""


def trained(name: str, dtype: torch.dtype, rank: int = 0, count: int = 1) -> dict[str, Tensor]:
    model = prepared(name, dtype, rank)
    calibrate(model, name, dtype, rank, count)
    parallel = DistributedDataParallel(model) if count > 1 else model
    list(train(parallel, optimizer_of(model, torch.optim.SGD), name, range(STEPS), rank, count))
    return {key: value.clone() for key, value in model.state_dict().items()}


def work(count: int, rank: int) -> dict[str, Any]:
    warnings.simplefilter("error")
    found: dict[str, Any] = {(name, key): trained(name, DTYPES[key], rank, count) for name in MODELS for key in DTYPES}
    if count == 2:
        found["explained"], found["operations"] = explained_in_parallel()
    return found


def explained_in_parallel() -> tuple[str, set[str]]:
    """What `explain` says of a model that trains under DDP, and autograd's nodes of its last step."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    x, _ = batch("cnn", 0, torch.float32)
    model = qat.prepare(net.eval(), example_inputs=x)
    qat.calibrate(model, [x])
    parallel = DistributedDataParallel(model.train())
    optimizer = optimizer_of(model, torch.optim.SGD)
    losses = list(train(parallel, optimizer, "cnn", range(2), dist.get_rank(), 2))
    nodes, waiting = set[Any](), [losses[-1].grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [each for each, _ in node.next_functions]
    return str(qat.explain(model)), {type(node).__name__ for node in nodes}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return on_ranks(partial(work, request.param), tmp_path_factory.mktemp("gloo"), request.param)


on_two_and_four = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)], indirect=True)
alone = cache(trained)


@on_two_and_four
@pytest.mark.parametrize("name", MODELS)
def test_ranks_train_the_model_of_one_process(ranks: list[dict[Any, Any]], name: str) -> None:
    states = [found[name, "float64"] for found in ranks]
    for key, value in alone(name, torch.float64).items():
        assert all(torch.equal(state[key], states[0][key]) for state in states), key
        torch.testing.assert_close(states[0][key], value, rtol=1e-6, atol=1e-9, msg=key)


@on_two_and_four
@pytest.mark.parametrize("name", ["cnn", "embedding", *(pytest.param(n, marks=pytest.mark.slow) for n in LONGER)])
def test_they_export_its_integers(ranks: list[dict[Any, Any]], name: str, tmp_path: Path) -> None:
    theirs = exported(ranks[0][name, "float32"], name, tmp_path)
    one = exported(alone(name, torch.float32), name, tmp_path)
    assert theirs.keys() == one.keys()
    apart = np.concatenate([np.abs(theirs[key] - one[key]).ravel() for key in one])
    assert apart.max() <= 1
    assert (apart > 0).mean() <= FLIPPED, f"{(apart > 0).sum()} of {apart.size} integers"


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_the_fused_path_stays_on(ranks: list[dict[Any, Any]]) -> None:
    for found in ranks:
        assert "trains on codes" in found["explained"], found["explained"]
        assert {"CodesProductFunctionBackward", "QuantizeChainFunctionBackward"} <= found["operations"]
