"""The device and precision of a config; and the loop when a faster way through the model fails, or is wrong."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qat.training.config.stages import QATStageConfig
from qat.training.loop.forward import EvaluationGraph, TrainingGraphs, as_tried, autocast, check_graphs
from qat.training.loop.stage import StageRun
from qat.training.ranks import pick_device
from tests.runs.tiny_training import CPU, Logged, Patch, curves, stage_run, tiny_model, train, user_error


class BrokenError(Exception):
    """An error of a compiler."""


def refusing(*_: Any) -> Any:
    raise BrokenError("no kernel for this device\nand more lines")


def steeper(y: Tensor) -> Tensor:
    return y.detach() + 100 * (y - y.detach())


COMPILERS = {
    "BrokenError: no kernel for this device": lambda model: refusing,
    "the loss of the faster model is": lambda model: lambda images: model(images) * 50 + 30 * torch.arange(2),
    "the gradients of the faster model have the norm": lambda model: lambda images: steeper(model(images)),
    "has no gradient in the faster model": (
        lambda model: lambda images: model(images).detach() + 0 * next(model.parameters()).sum()
    ),
}


def losses_of(folder: Path, compiled: bool) -> list[tuple[int, float]]:
    torch.manual_seed(0)
    run = stage_run(folder, tiny_model(), QATStageConfig(epochs=2, lr=0.1), config={"compile": compiled})
    train(run)
    return curves(folder)["qat/train/loss"]


@pytest.mark.parametrize("reason", COMPILERS)
def test_a_compiled_model_with_other_results_is_not_used(
    reason: str, tmp_path: Path, monkeypatch: Patch, caplog: Logged
) -> None:
    """The trial step does not change a bit of the run."""
    expected = losses_of(tmp_path / "plain", False)
    monkeypatch.setattr(torch, "compile", lambda model: COMPILERS[reason](model))
    assert losses_of(tmp_path / "compiled", True) == expected
    (said,) = [message for message in caplog.messages if message.startswith("compile: ")]
    assert reason in said and said.endswith("; training goes on without, slower")


def test_memory_shortage_is_not_blamed_on_the_compiler() -> None:
    def starving(images: Tensor) -> Any:
        raise MemoryError

    model, x = nn.Linear(3, 2), torch.ones(5, 3)
    with pytest.raises(MemoryError):
        as_tried("compile", starving, model, model, lambda run: run(x).sum())


def test_the_trial_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[0].weight.grad = torch.ones(3, 3)
    kept, x, seen = copy.deepcopy(model.state_dict()), torch.randn(7, 3), []
    numbers = torch.get_rng_state()

    def loss_of(forward: Any) -> Tensor:
        seen.append(forward)
        y: Tensor = forward(x).square().mean()
        return y

    as_tried("compile", model, model, model, loss_of)
    assert len(seen) == 2
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert torch.equal(model[0].weight.grad, torch.ones(3, 3)) and model[0].bias.grad is None


def graphs_on_the_cpu(monkeypatch: Patch, record: Any) -> None:
    """Let steps run as graphs that `record` makes of a module, in its place, and evaluations as they are."""
    monkeypatch.setattr(StageRun, "wants_graphs", True)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, images, **_: record(module))
    monkeypatch.setattr(EvaluationGraph, "__call__", lambda self, images: self.model(images))


def test_graphs_are_recorded_again_when_scales_freeze(tmp_path: Path, monkeypatch: Patch) -> None:
    torch.manual_seed(0)
    stage = QATStageConfig(epochs=4, lr=0.1, freeze_scales_epoch=2)
    train(stage_run(tmp_path / "plain", tiny_model(), stage))
    recorded: list[Any] = []
    graphs_on_the_cpu(monkeypatch, recorded.append)
    torch.manual_seed(0)
    train(stage_run(tmp_path / "graphs", tiny_model(), stage))
    assert len(recorded) == 2
    assert curves(tmp_path / "graphs")["qat/train/loss"] == curves(tmp_path / "plain")["qat/train/loss"]


def test_a_batch_of_another_shape_runs_beside_the_graph(monkeypatch: Patch) -> None:
    model = nn.Linear(3, 2)

    def record(module: nn.Module, images: Any, **_: Any) -> None:
        module.forward = lambda x: "graph"  # type: ignore[method-assign]

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    graphs = TrainingGraphs(model)
    assert graphs(torch.ones(5, 3)) == "graph" and graphs(torch.ones(5, 3)) == "graph"
    assert torch.equal(graphs(torch.ones(4, 3)), model(torch.ones(4, 3)))


def test_a_graph_that_cannot_be_recorded_is_said_and_left(tmp_path: Path, monkeypatch: Patch, caplog: Logged) -> None:
    graphs_on_the_cpu(monkeypatch, refusing)
    train(stage_run(tmp_path, tiny_model(), QATStageConfig(epochs=1, lr=0.1)))
    (said,) = [message for message in caplog.messages if message.startswith("cuda_graphs: ")]
    assert said.endswith("BrokenError: no kernel for this device; training goes on without, slower")


def test_frozen_norms_stay_frozen_in_a_graph(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda *_, **__: None)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    TrainingGraphs(model)(torch.ones(5, 3))
    assert not model[1].training


class Recorder:
    """Stands for a CUDA graph and its context."""

    def __init__(self, graph: Any = None) -> None:
        self.replays = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def replay(self) -> None:
        self.replays += 1


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_evaluation_is_recorded_once_if_it_answers_the_same(off: float, monkeypatch: Patch, caplog: Logged) -> None:
    model, x = nn.Linear(3, 2), torch.ones(5, 3)
    for name in ("CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, Recorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: model.bias.data.add_(off))
    graph = EvaluationGraph(model)
    with torch.no_grad():
        looking = model.register_forward_hook(lambda *_: looking.remove())
        graph(x)
        assert graph.graph is None  # a hook looked
        found = [graph(x), graph(x), graph(torch.ones(2, 3))]
    assert (graph.graph is None) == bool(off) and bool(caplog.messages) == bool(off)
    assert torch.equal(found[1], model(x)) and found[2].shape == (2, 2)
    assert off or graph.graph.replays == 3


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
