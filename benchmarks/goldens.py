"""What fourteen models compute today, so that a change of the house can be shown to change nothing.

    python -m benchmarks.goldens --write      # benchmarks/results/goldens.json, on the code that is the measure
    python -m benchmarks.goldens              # the same on the code of now: what differs, and seconds before and after
    python -m benchmarks.goldens --only lstm shared_4_bits

Losses and integers are those of one kind of processor: write and compare on the same machine. Models of transformers
and ultralytics need their packages, and are named where these are missing.
"""

import argparse
import copy
import functools
import hashlib
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import qat
from benchmarks.speed_rows import facts_of_run
from benchmarks.zoo_models import Case, build
from qat.codes.evaluation.program import integer_program
from qat.codes.training.rewriting import fused_graph
from qat.inputs import call_model, copied
from qat.integers.evaluation import evaluation_copy

RESULTS = Path(__file__).parent / "results" / "goldens.json"
ZOO = (
    "resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5", "regnet_y_400mf",
    "timm/vit_tiny_patch16_224", "transformers/bert", "ultralytics/yolov8n",
)  # fmt: skip
STEPS, ROUNDS = 5, 5
FOUR_BITS = {"weight": {"bits": 4}, "activation": {"bits": 4}}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.head(y[:, -1])


class Shared(nn.Module):
    """One convolution called twice, a sum, a clip, a concatenation, a table behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.conv = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.act, self.head = nn.SiLU(), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = (self.conv(x) + self.conv(x)).clamp(0.0, 4.0)
        return self.head(torch.cat([self.act(x), x], 1).mean((2, 3)))


class Untraceable(nn.Module):
    """A model whose middle decides by value: it is prepared in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Flatten(), nn.Linear(8 * 6 * 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x if x.sum().item() > -1e9 else -x)


def own(model: nn.Module, *inputs: Tensor) -> Callable[[], Case]:
    """A model of this file and its inputs."""
    return lambda: Case(model.eval(), inputs)


def cases() -> dict[str, tuple[Callable[[], Case], dict[str, Any]]]:
    """Name to what builds a model, and the settings of its recipe."""
    torch.manual_seed(0)
    images = torch.randn(4, 3, 8, 8)
    found: dict[str, tuple[Callable[[], Case], dict[str, Any]]] = {
        name: (functools.partial(build, name), {}) for name in ZOO
    }
    found["resnet18_x86"] = functools.partial(build, "resnet18"), {"target": "onnxruntime_x86"}
    found["shufflenet_4_bits"] = functools.partial(build, "shufflenet_v2_x0_5"), FOUR_BITS
    found["lstm"] = own(Recurrent(), torch.randn(4, 6, 8)), {}
    found["shared_4_bits"] = own(Shared(), images), FOUR_BITS
    found["in_parts"] = own(Untraceable(), images), {}
    return found


def golden(make: Callable[[], Case], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that is compared of one model, and the seconds that its parts take."""
    case = make()
    prepared, seconds = _prepared(case, settings)
    found: dict[str, Any] = {
        "summary": _hash(qat.summary(prepared)),
        "onnx": _tried(lambda: _onnx(prepared, case)),
        "explain": _hash(qat.explain(prepared, example_inputs=case.inputs)),
        "integer_program": _tried(lambda: _code(integer_program(evaluation_copy(prepared)))),  # type: ignore[arg-type]
    }
    answers = call_model(prepared.eval(), copied(case.inputs))
    found["answer"] = _hash([x.double().numpy().tobytes() for x in _floats(answers)])
    prepared.train()
    found["fused"] = _tried(lambda: _code(fused_graph(prepared)))  # type: ignore[arg-type]
    found["losses"], found["resumed"], step = _trained(prepared, case)
    seconds["step"], seconds["evaluation"] = step, _timed(lambda: call_model(prepared.eval(), copied(case.inputs)))
    if "target" not in settings:
        found["tflite"] = _tried(lambda: _tflite(make(), settings))
    return {**found, "seconds": {name: round(value, 5) for name, value in seconds.items()}}


def _floats(answers: Any) -> list[Tensor]:
    leaves = tree_leaves(answers)
    return [x.detach() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _prepared(case: Case, settings: dict[str, Any]) -> tuple[nn.Module, dict[str, float]]:
    began = time.perf_counter()
    prepared = qat.prepare(copy.deepcopy(case.model), qat.QuantRecipe(**settings), example_inputs=case.inputs)
    took = time.perf_counter() - began
    qat.calibrate(prepared, [case.inputs])
    return prepared, {"prepare": took}


def _trained(model: nn.Module, case: Case) -> tuple[list[str], bool, float]:
    """Losses to the bit, whether a copy resumed within them goes on the same, and the median seconds of a step."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[str]:
        losses = []
        for _ in range(count):
            began = time.perf_counter()
            loss = case.loss(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
            losses.append(float(loss.detach()).hex())
        return losses

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(qat.parameter_groups(model, lr=1e-4, weight_decay=1e-4), momentum=0.9)

    times: list[float] = []
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    first = optimizer_of(model)
    losses = steps(model, first, 2)
    other.load_state_dict(model.state_dict())
    second = optimizer_of(other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    state = torch.get_rng_state()
    losses += steps(model, first, STEPS - 2)
    torch.set_rng_state(state)
    return losses, steps(other, second, STEPS - 2) == losses[2:], statistics.median(times)


def _onnx(model: nn.Module, case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        qat.export_onnx(model, path, case.inputs)
        graph = onnx.load(path).graph
    kept = sorted((each.name, each.SerializeToString(deterministic=True)) for each in graph.initializer)
    return _hash([*kept, *(node.op_type for node in graph.node)])


def _tflite(case: Case, settings: dict[str, Any]) -> str:
    model, _ = _prepared(case, {**settings, "target": "litert"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        qat.export_litert(model, path, case.inputs)
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _code(made: fx.GraphModule | fx.Graph | None) -> str:
    """The graph by the names of what it calls, wherever these functions live."""
    if made is None:
        return "none"
    graph = made.graph if isinstance(made, fx.GraphModule) else made
    return _hash([(n.op, getattr(n.target, "__name__", n.target), n.name, n.args, n.kwargs) for n in graph.nodes])


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value if isinstance(value, list) else str(value)).encode()).hexdigest()[:16]


def _tried(run: Callable[[], str]) -> str:
    try:
        return run()
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def _timed(run: Callable[[], Any]) -> float:
    run()
    times = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def compared(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys of one model that differ."""
    return [key for key in before.keys() | now.keys() if key != "seconds" and before.get(key) != now.get(key)]


def main(arguments: list[str] | None = None) -> int:
    """Write or compare, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(cases()))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    differing = 0
    for name, (make, settings) in cases().items():
        if given.only and name not in given.only:
            continue
        torch.manual_seed(0)
        try:
            found = golden(make, settings)
        except ImportError as error:
            print(f"{name}: not tried, {error}")
            continue
        before = kept["models"].get(name, {})
        keys = compared(before, found)
        said = ("differs in " + ", ".join(sorted(keys)) if before else "new") if keys else "equal"
        differing += bool(keys)
        times = [
            f"{key} {before.get('seconds', {}).get(key, 0):.3f} -> {s:.3f} s" for key, s in found["seconds"].items()
        ]
        print(f"{name}: {said}; {', '.join(times)}", flush=True)
        if given.write:
            kept["models"][name] = found
            RESULTS.write_text(json.dumps({**facts_of_run(), "models": kept["models"]}, indent=1) + "\n")
    return 0 if given.write or not differing else 1


if __name__ == "__main__":
    sys.exit(main())
