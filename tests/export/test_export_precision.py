"""Exact integer products in ONNX Runtime on every processor: files that load in either mode, and exact sessions."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.export import compare_layers
from qat.export.onnxruntime import session, verification
from qat.kernels.cpu import processor
from tests.export import test_export_layers as layers
from tests.references.prepared_case import Plain


class Shared(nn.Module):
    """Layers of one width: one that is called twice, a transposed one, and a small weight that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.twice(torch.relu(self.stem(x))))
        x = self.up(torch.relu(x + self.twice(x))).mean((2, 3))
        return self.fc(torch.relu(self.fc(x)))


def recurrent() -> nn.Module:
    lstm = nn.LSTM(8, 4, bidirectional=True, batch_first=True)
    return Plain(lambda self, x: self.lstm(self.table(x))[0], table=nn.Embedding(16, 8), lstm=lstm)


FOLDER = tempfile.TemporaryDirectory()
"""Of files that several tests read; it is removed at the end."""

MODELS = {
    "shared": (Shared, torch.linspace(0, 1, 768).reshape(4, 3, 8, 8)),
    "recurrent": (recurrent, torch.arange(12).reshape(3, 4)),
    "attention": (lambda: layers.SelfAttention("prepared"), torch.linspace(-1, 1, 80).reshape(2, 5, 8).sin()),
}


@functools.cache
def exported(name: str, target: str = "onnxruntime") -> tuple[Path, nn.Module, Tensor]:
    """A file that no test changes, its model and an input."""
    torch.manual_seed(0)
    make, x = MODELS[name]
    path = Path(tempfile.mkdtemp(dir=FOLDER.name)) / f"{name}.onnx"
    recipe = qat.QuantRecipe(target=target)  # type: ignore[arg-type]
    return path, layers.exported(path, make(), {"x": x}, recipe), x


def optimised(path: Path, folder: Path, precision: str) -> list[str]:
    """The operators that a session runs; it also proves that the session can be opened."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", precision)
    options.optimized_model_filepath = str(folder / f"optimised{precision}.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return sorted(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("name", MODELS)
def test_the_file_loads_in_either_mode_and_runs_the_same_operators(name: str, target: str, tmp_path: Path) -> None:
    path, _, _ = exported(name, target)
    assert optimised(path, tmp_path, "1") == optimised(path, tmp_path, "0")


def test_weights_are_called_after_their_layers(tmp_path: Path) -> None:
    graph = onnx.load(exported("shared")[0]).graph
    names = [node.name for node in graph.node if ".weight" in node.name]
    assert names == ["stem.weight", "twice.weight", "twice.weight.1", "up.weight", "fc.weight", "fc.weight.1"]


@pytest.mark.parametrize("asked", [None, "vnni", "no-vnni"])
def test_a_session_takes_the_option_where_it_needs_it(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    if asked is not None:
        monkeypatch.setenv(processor.VARIABLE, asked)
    as_it_is = session.multiplies_exactly(with_option=False)
    assert session.default_is_exact() is {None: as_it_is, "vnni": True, "no-vnni": False}[asked]
    assert session.needs_option() is (asked == "no-vnni" or not as_it_is)
    assert session.multiplies_exactly(with_option=True)


def test_the_probe_sees_sums_that_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of its four products, since each runs another kernel."""
    real, saturated = ort.InferenceSession, [0]

    class Saturating:
        def __init__(self, *given: Any, **options: Any) -> None:
            self.session = real(*given, **options)

        def run(self, names: Any, feed: Any) -> list[Any]:
            answers = list(self.session.run(names, feed))
            answers[saturated[0]] = answers[saturated[0]].clip(-(2**15), 2**15 - 1)
            return answers

    monkeypatch.setattr(ort, "InferenceSession", Saturating)
    for number in range(4):
        saturated[:] = [number]
        assert not session.multiplies_exactly.__wrapped__(with_option=True)


def test_a_processor_that_multiplies_exactly_in_no_session_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model, x = exported("shared")
    monkeypatch.setattr(session, "multiplies_exactly", lambda with_option: False)
    with pytest.raises(RuntimeError, match=r"^ONNX Runtime [\d.]+ does not multiply integers exactly on this "):
        qat.verify_onnx(path, model, [x])
    qat.verify_onnx(path, model, [x], default_session=True)  # says nothing about exact products


@pytest.mark.parametrize("default", [False, True])
def test_the_proof_multiplies_exactly_unless_the_default_is_asked_for(
    default: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model, x = exported("shared")
    opened: list[bool] = []
    real = session.open_session

    def noted(*given: Any, **options: Any) -> Any:
        opened.append(options.get("exact", True))
        return real(*given, **options)

    monkeypatch.setattr(verification, "open_session", noted)
    monkeypatch.setenv(processor.VARIABLE, "no-vnni")
    found = qat.verify_onnx(path, model, [x], default_session=default)
    compare_layers(path, model, x, default_session=default)
    assert opened == [not default] * 4  # of the answers, of the operators, of the layers, and of the answers unread
    assert default or found.agreement == 1.0
