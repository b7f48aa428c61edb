"""A value that is quantized twice is rounded twice; why a file predicts otherwise: near-ties, or another function."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import qat
from qat.export import Differences, compare_layers, explain_differences
from qat.export import exporter as exporter_module
from qat.quantizer import create_quantizer
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain

BETWEEN = {"nothing": nn.Identity(), "pool": nn.MaxPool2d(2), "reshape": nn.Flatten(2), "relu": nn.ReLU()}


def twice(between: nn.Module, spec: qat.QuantSpec) -> nn.Module:
    """A convolution whose result is quantized on two grids."""
    layers = {"conv": qat.QuantConv2d(3, 8, 3, padding=1), "between": between}
    quantizers = {name: create_quantizer(spec, "activation", ()) for name in ("first", "second")}
    return Plain(lambda self, x: self.second(self.between(self.first(self.conv(x)))), **layers, **quantizers)


@pytest.mark.parametrize(("between", "symmetric"), [*((name, False) for name in BETWEEN), ("nothing", True)])
def test_both_roundings_are_in_the_file(between: str, symmetric: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(16, 3, 8, 8), tmp_path / "model.onnx"
    model = twice(BETWEEN[between], qat.QuantSpec(signed=symmetric, symmetric=symmetric))
    qat.calibrate(model, [x])
    with torch.no_grad():
        model.second.scale.mul_(0.83)
    model.eval()
    with torch.no_grad():
        once = model.second(model.between(model.conv(x)))
        assert not torch.equal(model(x), once)  # else the test could not fail
    qat.export_onnx(model, path, x)
    assert qat.verify_onnx(path, model, [x]).max_difference < 1e-6


@pytest.fixture
def on_ties() -> tuple[nn.Module, torch.Tensor]:
    """A model and inputs at ties, one level of which decides the class."""
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        net.bias.zero_()
    x = torch.linspace(-1, 1, 20).reshape(10, 2)
    model = quantized(nn.Sequential(net), x)
    scale = model.get_submodule("input_quantizer").grid()[0].detach()
    return model, -scale * torch.arange(20).reshape(10, 2) - scale / 2 * (torch.arange(10) % 2)[:, None]


def explained(
    model: nn.Module, changed: Callable[[nn.Module], None], x: torch.Tensor, path: Path, **options: int
) -> Differences:
    """What is found of a file that was made of a changed copy."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        changed(other)
    qat.export_onnx(other, path, x)
    return explain_differences(path, model, [x], **options)


def test_a_near_tie_that_falls_the_other_way_is_explained(
    on_ties: tuple[nn.Module, torch.Tensor], tmp_path: Path
) -> None:
    model, _ = on_ties
    quantizer = model.get_submodule("input_quantizer")
    x = torch.full((4, 2), -0.5) * quantizer.grid()[0].detach()
    found = explained(model, lambda m: m.get_submodule("input_quantizer").scale.mul_(1 - 1e-6), x, tmp_path / "m.onnx")
    assert (found.predictions, found.differing, found.unexplained) == (4, 4, 0)
    (layer,) = found.layers
    assert (layer.name, layer.differing, layer.largest, layer.beyond_ties) == ("input_quantizer", 8, 1, 0)


@pytest.mark.parametrize("enough", [None, 1])
def test_a_scale_of_five_percent_more_is_another_function(
    enough: int | None, on_ties: tuple[nn.Module, torch.Tensor], tmp_path: Path
) -> None:
    model, _ = on_ties
    scale = model.get_submodule("input_quantizer").grid()[0].detach()
    x = torch.tensor([[-0.52, 3.0], [0.6, 2.0]]) * scale
    found = explained(model, lambda m: m.get_submodule("input_quantizer").scale.mul_(1.05), x, tmp_path / "m.onnx")
    assert (found.differing, found.unexplained) == (1, 2)  # of the other one the class is right, and the values are not
    assert found.layers[0].largest == 1 and found.layers[0].beyond_ties == 1  # by one level, but no tie


@pytest.fixture
def merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, nn.Module, torch.Tensor]:
    """A file whose two quantizers ONNX Runtime merges, unless somebody reads the integers between them."""
    monkeypatch.setattr(exporter_module, "add_barriers", lambda proto: None)
    torch.manual_seed(0)
    x, path = torch.randn(16, 3, 8, 8), tmp_path / "model.onnx"
    model = twice(BETWEEN["nothing"], qat.QuantSpec(signed=False, symmetric=False))
    qat.calibrate(model, [x])
    with torch.no_grad():
        model.second.scale.mul_(0.83)
    qat.export_onnx(model.eval(), path, x)
    return path, model, x


def test_what_the_runtime_merges_where_nobody_looks_is_another_function(
    merged: tuple[Path, nn.Module, torch.Tensor],
) -> None:
    """Reading the integers between two quantizers keeps ONNX Runtime from merging them: each layer alone is right."""
    path, model, x = merged
    found = explain_differences(path, model, [x, x])
    assert found.predictions == 2 * 16 * 64 and found.differing > 5
    assert found.unexplained > 0.9 * found.differing
    assert not any(layer.beyond_ties for layer in found.layers if not layer.fused)
    assert {layer.fused for layer in found.layers} == {(), ("first", "second")}
    assert explain_differences(path, model, [x, x], enough=1).predictions == 16 * 64


def test_a_fusion_where_nobody_looks_is_named(merged: tuple[Path, nn.Module, torch.Tensor]) -> None:
    *layers, fusion = compare_layers(*merged)
    assert not any(layer.beyond_ties or layer.fused for layer in layers)
    assert fusion.fused == ("first", "second") and fusion.beyond_ties > 0.1 * fusion.elements
    assert not any(layer.fused for layer in compare_layers(*merged, optimize=False))


def test_equal_predictions_need_no_explanation(on_ties: tuple[nn.Module, torch.Tensor], tmp_path: Path) -> None:
    model, x = on_ties
    found = explained(model, lambda m: None, x, tmp_path / "model.onnx")
    assert found == Differences(10, 0, 0, [])


def test_nothing_to_compare_is_a_sentence(on_ties: tuple[nn.Module, torch.Tensor], tmp_path: Path) -> None:
    model, x = on_ties
    qat.export_onnx(model, tmp_path / "model.onnx", x)
    with pytest.raises(ValueError, match="explain_differences: batches is empty"):
        explain_differences(tmp_path / "model.onnx", model, [])
