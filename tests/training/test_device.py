"""The device, precision and seeds that a config names."""

import pytest
import torch

from qat.training.loop.forward import autocast, check_graphs
from qat.training.ranks import pick_device
from tests.runs.tiny_training import CPU, user_error


@pytest.mark.parametrize(("name", "count", "expected"), [
    ("auto", 0, "cpu"),
    ("auto", 2, "cuda:0"),
    ("cpu", 2, "cpu"),
    ("cuda", 2, "cuda:0"),
    ("cuda:1", 2, "cuda:1"),
    ("cuda", 0, "device: 'cuda' needs a CUDA device and torch sees none; choose auto or cpu"),
    ("cuda:2", 2, "device: 'cuda:2' is not there; torch sees 2: cuda:0 to cuda:1"),
    ("gpu", 2, "device: 'gpu' is not a device; choose auto, cpu, cuda or cuda:<number>"),
    ("cuda:-1", 0, "device: 'cuda:-1' is not a device; choose auto, cpu, cuda or cuda:<number>"),
])  # fmt: skip
def test_device_names(name: str, count: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    if expected.startswith("device"):
        assert user_error(pick_device, name) == expected
    else:
        assert pick_device(name) == torch.device(expected)


def test_mixed_precision_on_the_cpu() -> None:
    x = torch.ones(2, 2)
    with autocast(CPU, "bf16"):
        assert (x @ x).dtype is torch.bfloat16
    with autocast(CPU, "none"):
        assert (x @ x).dtype is torch.float32
    said = user_error(autocast, CPU, "fp16")
    assert said == "amp: 'fp16' needs a CUDA device; on device 'cpu' use 'bf16' or 'none'"


def test_cuda_graphs_need_cuda() -> None:
    check_graphs(torch.device("cuda"), True)
    check_graphs(CPU, "auto")
    said = user_error(check_graphs, CPU, True)
    assert said == "cuda_graphs: true needs a CUDA device; on device 'cpu' leave it out"
