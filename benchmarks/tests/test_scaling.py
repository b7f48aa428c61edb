"""The counts of benchmarks/scaling.py against what torch does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import qat
from benchmarks import scaling


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_makes_these_buckets(group: None) -> None:
    layers = [layer for _ in range(9) for layer in (nn.Linear(1000, 1000), nn.BatchNorm1d(1000), nn.ReLU())]
    images = torch.randn(4, 1000)
    model = qat.prepare(nn.Sequential(*layers), example_inputs=images)
    qat.calibrate(model, [images])
    wrapped = nn.parallel.DistributedDataParallel(model.train())
    seen: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.buffer().nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, hook)
    for _ in range(2):  # the first step learns the order
        seen.clear()
        wrapped(images).sum().backward()
    expected = scaling.buckets_of(p.nbytes for p in reversed(list(model.parameters())))
    assert len(seen) == len(expected) == 3
    assert sum(seen) == sum(expected) == sum(p.nbytes for p in model.parameters())
    for found, counted in zip(seen, expected, strict=True):  # the backward finds neighbours in another order
        assert abs(found - counted) < 5e6


def test_a_ring_sends_all_but_its_own_share_twice() -> None:
    assert scaling.ring_bytes(800, 8) == 2 * 7 * 100 and scaling.ring_bytes(800, 1) == 0


def test_a_ring_over_machines_has_a_hop_by_network_from_each_to_the_next() -> None:
    assert scaling.latency(1, 8) == pytest.approx(scaling.BASE + 7 * scaling.HOP)
    assert scaling.latency(2, 64) == pytest.approx(scaling.BASE + 2 * (56 * scaling.HOP + 7 * scaling.FAR_HOP))


def test_the_counts_of_a_model_add_up() -> None:
    row = scaling.counted("resnet18")
    assert row["bytes"] - row["float_bytes"] == row["scale_bytes"] > 0
    assert sum(row["buckets"]) == row["bytes"] and sum(row["float_buckets"]) == row["float_bytes"] == 4 * 11689512
    channels = 64 * 5 + 128 * 5 + 256 * 5 + 512 * 5
    assert row["norms"] == 20 and row["norm_bytes"] == 4 * (4 * channels + 20)
