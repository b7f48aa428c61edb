"""Exact integer products on every processor: files for either mode, exact sessions, which sums of 16 bits saturate."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.export import compare_layers, find_saturation
from qat.export.onnx.saturation import worst_pair
from qat.export.onnxruntime import session, verification
from qat.kernels.cpu import processor
from tests.export import test_export_layers as layers
from tests.references.prepared_case import Plain


def shared(self: Any, x: Tensor) -> Tensor:
    """Layers of one width: one that is called twice, a transposed one, and a small weight that is read twice."""
    x = torch.relu(self.twice(torch.relu(self.stem(x))))
    x = self.up(torch.relu(x + self.twice(x))).mean((2, 3))
    return self.fc(torch.relu(self.fc(x)))  # type: ignore[no-any-return]


CONVS = {"stem": nn.Conv2d(3, 8, 3, padding=1), "twice": nn.Conv2d(8, 8, 3, padding=1)}
SHARED = Plain(shared, **CONVS, up=nn.ConvTranspose2d(8, 8, 2), fc=nn.Linear(8, 8))
LSTM = nn.LSTM(8, 4, bidirectional=True, batch_first=True)
RECURRENT = Plain(lambda self, x: self.lstm(self.table(x))[0], table=nn.Embedding(16, 8), lstm=LSTM)
FOLDER = tempfile.TemporaryDirectory()
"""Of files that several tests read; it is removed at the end."""

MODELS = {
    "shared": (SHARED, torch.linspace(0, 1, 768).reshape(4, 3, 8, 8)),
    "recurrent": (RECURRENT, torch.arange(12).reshape(3, 4)),
    "attention": (layers.self_attention("prepared"), torch.linspace(-1, 1, 80).reshape(2, 5, 8).sin()),
}


@functools.cache
def exported(name: str, target: str = "onnxruntime") -> tuple[Path, nn.Module, Tensor]:
    """A file that no test changes, its model and an input."""
    net, x = MODELS[name]
    path = Path(tempfile.mkdtemp(dir=FOLDER.name)) / f"{name}.onnx"
    return path, layers.exported(path, net, {"x": x}, qat.QuantRecipe(target=target)), x  # type: ignore[arg-type]


def optimised(path: Path, folder: Path, precision: str) -> list[str]:
    """The operators that a session runs; it also proves that the session can be opened."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", precision)
    options.optimized_model_filepath = str(folder / f"optimised{precision}.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return sorted(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)


@pytest.mark.parametrize(("name", "target"), [*((name, "onnxruntime") for name in MODELS), ("shared", "tensorrt")])
def test_the_file_runs_the_same_operators_in_either_mode(name: str, target: str, tmp_path: Path) -> None:
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


def test_a_processor_exact_in_no_session_proves_nothing(tmp_path, monkeypatch):
    path, model, x = exported("shared")
    monkeypatch.setattr(session, "multiplies_exactly", lambda with_option: False)
    with pytest.raises(RuntimeError, match=r"^ONNX Runtime [\d.]+ does not multiply integers exactly on this "):
        qat.verify_onnx(path, model, [x])
    qat.verify_onnx(path, model, [x], default_session=True)  # says nothing about exact products


@pytest.mark.parametrize("default", [False, True])
def test_the_proof_multiplies_exactly_unless_told_otherwise(default, tmp_path, monkeypatch):
    path, model, x = exported("shared")
    opened, real = [], session.open_session

    def noted(*given: Any, **options: Any) -> Any:
        opened.append(options.get("exact", True))
        return real(*given, **options)

    monkeypatch.setattr(verification, "open_session", noted)
    monkeypatch.setenv(processor.VARIABLE, "no-vnni")
    found = qat.verify_onnx(path, model, [x], default_session=default)
    compare_layers(path, model, x, default_session=default)
    assert opened == [not default] * 4  # of the answers, of the operators, of the layers, and of the answers unread
    assert default or found.agreement == 1.0


def all_pairs(row: Any, code: int) -> int:
    """Brute force: every pair of weights, every pair of codes at their ends, single products too."""
    codes = np.array([0, code])
    products = np.multiply.outer(row.astype(int), codes).ravel()
    sums = [0, *products]
    for one in range(len(row)):
        for other in range(one):
            sums += [a * row[one] + b * row[other] for a in codes for b in codes]
    return int(max(sums, key=abs))


@pytest.mark.parametrize("code", [255, 135, 15, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_the_worst_pair_is_that_of_brute_force(size: int, code: int) -> None:
    generator = np.random.default_rng(size)
    for low, high in ((-128, 127), (-3, 127), (-128, 3), (1, 90), (-90, -1), (0, 0)):
        row = generator.integers(low, high + 1, size).astype(np.int8)
        assert abs(worst_pair(row, code)) == abs(all_pairs(row.astype(int), code))


def saturating(self: Any, x: Tensor) -> Tensor:
    x = torch.relu(self.stem(x))
    x = nn.functional.max_pool2d(torch.relu(self.depthwise(torch.relu(self.single(x)))), 2)
    x = x.mean((2, 3))
    return self.fc(torch.relu(x[:, None] @ x[:, :, None]).flatten(1) * x)


NET = Plain(saturating, stem=nn.Conv2d(3, 8, 3, padding=1), single=nn.Conv2d(8, 8, 1, groups=8),
            depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8), fc=nn.Linear(8, 4))  # fmt: skip


def exported_net(folder: Path, recipe: qat.QuantRecipe) -> tuple[Path, Any]:
    torch.manual_seed(0)
    for layer in NET.children():
        layer.reset_parameters()  # type: ignore[operator]
    path = folder / "model.onnx"
    return path, layers.exported(path, NET, {"x": torch.rand(4, 3, 8, 8)}, recipe)


def test_layer_by_layer_and_channel_by_channel(tmp_path: Path) -> None:
    path, model = exported_net(tmp_path, qat.QuantRecipe())
    found = {each.layer: each for each in find_saturation(path)}
    assert list(found) == ["stem", "single", "depthwise", "fc"]  # the product of activations is uint8 by uint8
    for name, each in found.items():
        layer = model.get_submodule(name)
        codes = layer.weight_quantizer.codes(layer.weight).detach().flatten(1).numpy()
        expected = [all_pairs(row, 255) for row in codes]
        assert [abs(value) for value in each.sums] == [abs(value) for value in expected]
        assert each.channels == tuple(i for i, value in enumerate(expected) if not -(2**15) <= value < 2**15)
        assert abs(each.largest) == max(map(abs, expected))
    assert found["single"].channels == () and found["stem"].channels


@pytest.mark.parametrize(("recipe", "may"), [
    (qat.QuantRecipe(target="onnxruntime_x86"), False),
    (qat.QuantRecipe(overrides={"*": {"weight": {"max_magnitude": 64}}}), False),
    (qat.QuantRecipe(overrides={"*": {"weight": {"bits": 7}}}), False),
    (qat.QuantRecipe(overrides={"*": {"weight": {"max_magnitude": 65}}}), True),
    # Inputs with seven bits have codes up to 127, and 127 * (127 + 127) fits.
    (qat.QuantRecipe(activation=qat.QuantSpec(bits=7)), False),
    (qat.QuantRecipe(activation=qat.QuantSpec(bits=8)), True),
    # Signed ones arrive with 128 added.
    (qat.QuantRecipe(activation=qat.QuantSpec(bits=4, signed=True, symmetric=True)), True),
    (qat.QuantRecipe(target="tensorrt"), True),
])  # fmt: skip
def test_which_models_may_saturate(recipe: qat.QuantRecipe, may: bool, tmp_path: Path) -> None:
    path, _ = exported_net(tmp_path, recipe)
    found = find_saturation(path)
    assert len(found) >= 4 and any(each.channels for each in found) is may
    # The second factor of a product of two activations, whose integers are unknown before it runs.
    products = [(each.sums, each.channels) for each in found if "quantizer" in each.layer]
    assert recipe.target != "tensorrt" or products == [((-255 * 256,), (0,))]
