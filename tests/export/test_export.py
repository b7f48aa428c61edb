"""Export: integer initializers, the same integers in ONNX Runtime as in torch, and clear refusals."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import qat
from qat.export import compare_layers, optimized_operators
from qat.layers import QuantLayer
from qat.quantizer import LSQQuantizer, Quantizer


class Small(nn.Module):
    """Every kind of layer in a ResNet on small tensors: max pool, residual add, downsampling, average pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2)
        self.conv, self.bn, self.relu = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.stem(x)))
        x = self.relu(self.bn(self.conv(x)) + x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def small_model(recipe: qat.QuantRecipe | None = None) -> torch.fx.GraphModule:
    """A prepared, calibrated and briefly trained Small, with gammas of both signs and one of zero."""
    torch.manual_seed(0)
    net = Small()
    with torch.no_grad():
        net.bn.weight.copy_(torch.linspace(-1, 1, 8))
        net.bn.weight[3] = 0
        net.bn.bias.normal_()
    x = torch.randn(8, 3, 8, 8)
    model = qat.prepare(net, recipe, x)
    qat.calibrate(model, [x])
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        model.bn.weight[3] = 0
    return model.eval()


def exported(path: Path, model: nn.Module) -> Path:
    qat.export_onnx(model, path, torch.randn(1, 3, 8, 8))
    return path


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_runtime_computes_every_layers_integers(tmp_path: Path, bits: int) -> None:
    activation = {"bits": bits, "signed": False, "symmetric": False, "init": "mse"}
    model = small_model(qat.QuantRecipe({"bits": bits}, activation))
    path = exported(tmp_path / "model.onnx", model)
    for optimize in (True, False):
        found = compare_layers(path, model, torch.randn(64, 3, 8, 8), optimize)
        elements, differing = (sum(getattr(layer, each) for layer in found) for each in ("elements", "differing"))
        assert elements > 60_000 and differing <= 1 and max(layer.largest for layer in found) <= 1
    operators = optimized_operators(path)
    if bits == 8:
        assert operators["QLinearAdd"] == operators["QGemm"] == operators["QLinearGlobalAveragePool"] == 1
    assert operators["QLinearConv"] == 2 and not {"Conv", "FusedConv", "Gemm", "MatMul"} & set(operators)


def test_grids_beyond_the_runtimes_range_are_averaged_in_float(tmp_path: Path) -> None:
    model = small_model()
    with torch.no_grad():
        model.avgpool_quantizer.smallest_scale.fill_(1e-9)
        model.avgpool_quantizer.scale.fill_(1e-9)  # ONNX Runtime refuses such a ratio of scales when it runs
    path = exported(tmp_path / "model.onnx", model)
    assert "QLinearGlobalAveragePool" not in optimized_operators(path)
    assert qat.verify_onnx(path, model, [torch.randn(8, 3, 8, 8)]).agreement == 1.0


def test_the_file_holds_the_trained_integers(tmp_path: Path) -> None:
    model = small_model()
    proto = onnx.load(exported(tmp_path / "model.onnx", model))
    arrays = {i.name: numpy_helper.to_array(i) for i in proto.graph.initializer}
    int8_weights = [a for a in arrays.values() if a.dtype == np.int8 and a.ndim > 1]
    for name, module in model.named_modules():
        if isinstance(module, QuantLayer):
            codes = module.weight_quantizer.codes(module.weight).detach().numpy()
            if name == "conv":
                gamma = model.bn.weight.detach().numpy()
                codes = codes * np.sign(gamma)[:, None, None, None]
            assert any(a.shape == codes.shape and np.array_equal(a, codes) for a in int8_weights), name
    assert not [name for name, a in arrays.items() if a.dtype == np.float32 and a.ndim > 1], "a weight is left in float"
    biases = [a for a in arrays.values() if a.dtype == np.int32]
    assert sorted(a.shape for a in biases) == [(8,), (8,), (10,)]
    outputs = {output for node in proto.graph.node for output in node.output}
    assert {n for n, m in model.named_modules() if isinstance(m, Quantizer) and m.role == "activation"} <= outputs


def test_export_changes_nothing_and_any_batch_size_runs(tmp_path: Path) -> None:
    model = small_model().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    path = exported(tmp_path / "model.onnx", model)
    for size in (1, 5):
        images = torch.randn(size, 3, 8, 8)
        result = qat.verify_onnx(path, model, [(images, torch.zeros(size)), (images, torch.ones(size))])
        assert result.samples == 2 * size and result.agreement == 1.0
        assert result.torch_top1 == result.onnx_top1 and result.max_difference < 0.05
    assert qat.verify_onnx(path, model, torch.randn(6, 3, 8, 8)).samples == 6
    assert model.training and all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_model_that_writes_into_its_input_is_verified(tmp_path: Path) -> None:
    """Both get the batch as it was, and so does who gave it."""
    x, path = torch.randn(4, 2, 5, 5), tmp_path / "model.onnx"
    model = qat.prepare(nn.Sequential(nn.ReLU6(inplace=True), nn.Conv2d(2, 3, 1)), example_inputs=x)
    given = x.clone()
    qat.calibrate(model, [given])
    assert qat.self_check(model, given)
    qat.export_onnx(model, path, given)
    assert qat.verify_onnx(path, model, [given]).max_difference < 1e-5
    assert not any(each.differing for each in compare_layers(path, model, given))
    qat.export_litert(model, path, given, batch=4)
    assert qat.verify_litert(path, model, [given]).max_difference < 1e-5
    assert torch.equal(given, x)


REFUSED: list[tuple[Callable[[], nn.Module], type[Exception], str]] = [
    (Small, TypeError, "expected a model from qat.prepare, got Small without quantizers"),
    (lambda: qat.prepare(Small(), example_inputs=torch.randn(1, 3, 8, 8)), ValueError,
     "'input_quantizer' has no range yet; call qat.calibrate(model, batches) first"),
    (lambda: small_model(qat.QuantRecipe(overrides={"conv": {"weight": {"bits": 12}}})), ValueError,
     "'conv.weight_quantizer' has the integers -2047 to 2047; integer kernels take at most 8 bits"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "sentence"), REFUSED)
def test_refusals_are_sentences_and_leave_an_existing_file(tmp_path, make, error, sentence):
    path = tmp_path / "model.onnx"
    path.write_text("precious")
    with pytest.raises(error) as caught:
        exported(path, make())
    assert str(caught.value) == f"export_onnx: {sentence}"
    assert path.read_text() == "precious" and list(tmp_path.iterdir()) == [path]


def half_up(self: Quantizer, x: torch.Tensor) -> torch.Tensor:
    scale, zero_point = self.grid()
    return torch.clamp(torch.floor(x / scale + 0.5) + zero_point, *self.bounds())


def values_half_up(self: Quantizer, x: torch.Tensor) -> torch.Tensor:
    scale, zero_point = self.grid()
    return (half_up(self, x) - zero_point) * scale


OWN = LSQQuantizer.quantize
RULES: list[tuple[dict[str, Any], str]] = [  # what of the rule lsq is another, the fact
    ({"exportable": False}, "uses the rule 'lsq', whose values lie on no integer grid"),
    ({"compute_codes": half_up, "quantize": values_half_up}, "'input_quantizer': the rule 'lsq' has other integers"),
    ({"quantize": lambda self, x: OWN(self, x) * 0.5}, "other values in quantize(x) than its codes(x) and grid() say"),
]


@pytest.mark.parametrize(("changes", "fact"), RULES)
def test_a_rule_without_the_integers_of_runtimes_is_refused(changes, fact, tmp_path, monkeypatch):
    model = small_model()
    for name, value in changes.items():
        monkeypatch.setattr(LSQQuantizer, name, value)
    with pytest.raises(ValueError, match=re.escape(fact)):
        exported(tmp_path / "model.onnx", model)


def test_inputs_with_which_the_model_does_not_run_are_a_sentence(tmp_path: Path) -> None:
    sentence = r"^export_onnx: .+ does not run with the example_inputs float32 \(1, 4, 8, 8\): the model was prepared"
    with pytest.raises(ValueError, match=sentence + r" for inputs with x\.shape\[1\] == 3, .+$"):
        qat.export_onnx(small_model(), tmp_path / "model.onnx", torch.randn(1, 4, 8, 8))
    assert not list(tmp_path.iterdir())


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (done.append(name), real(*given)))
    model = small_model()
    done.clear()  # compiled kernels are put in place too
    exported(tmp_path / "model.onnx", model)
    assert done == ["fsync", "replace"] and [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_weights_that_do_not_fit_int8_are_refused(tmp_path: Path) -> None:
    model = small_model(qat.QuantRecipe(weight=qat.QuantSpec(narrow_range=False)))
    with torch.no_grad():
        for layer in (model.conv, model.stem, model.fc):
            layer.weight.copy_(-layer.weight.abs() * 100)
    with pytest.raises(ValueError, match=r"the integers of its weight range from -?\d+ to \d+, outside int8"):
        exported(tmp_path / "model.onnx", model)


def test_metadata_are_json_in_the_file(tmp_path: Path) -> None:
    model, images = small_model(), torch.randn(1, 3, 8, 8)
    notes = {"classes": ["cat", "größe"], "mean": (0.5, 0.25), "model": "small", "epoch": 3, "none": None}
    qat.export_onnx(model, tmp_path / "x.onnx", images, metadata=notes)
    found = {each.key: json.loads(each.value) for each in onnx.load(tmp_path / "x.onnx").metadata_props}
    assert found == {**notes, "mean": [0.5, 0.25]}
    qat.export_onnx(model, tmp_path / "y.onnx", images)
    assert not onnx.load(tmp_path / "y.onnx").metadata_props


@pytest.mark.parametrize(("metadata", "sentence"), [
    ({"scale": np.ones(2)}, r"'scale'\] cannot be written as JSON \(Object of type ndarray is not JSON "),
    ({"loss": float("nan")}, r"'loss'\] cannot be written as JSON \(Out of range float values are not "),
])  # fmt: skip
def test_metadata_that_json_cannot_write_are_refused(tmp_path: Path, metadata: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=rf"^export_onnx: metadata\[{sentence}"):
        qat.export_onnx(nn.Identity(), tmp_path / "x.onnx", torch.zeros(1), metadata=metadata)
