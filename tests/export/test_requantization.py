"""A value that is quantized twice is rounded twice in ONNX Runtime too, which would merge the two quantizers."""

from pathlib import Path

import onnx
import pytest
import torch
from prepared_case import Plain
from torch import nn

import qat
from qat.quantizer import create_quantizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

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


def test_equal_grids_stay_scalars(tmp_path: Path) -> None:
    """Merging equal grids changes nothing, and other runtimes fuse scalars best."""
    x, path = torch.randn(16, 3, 8, 8), tmp_path / "model.onnx"
    model = twice(nn.Flatten(2), qat.QuantSpec(signed=False, symmetric=False))
    qat.calibrate(model, [x])
    model.second.load_state_dict(model.first.state_dict())
    qat.export_onnx(model.eval(), path, x)
    quantizers = [node for node in onnx.load(path).graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantizers) == 3 and not any(node.attribute for node in quantizers)


def test_a_tensor_without_a_fixed_axis(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(200, 1), tmp_path / "model.onnx"
    model = twice(nn.Identity(), qat.QuantSpec(signed=False, symmetric=False))
    model.conv = qat.QuantLinear(1, 1)
    qat.calibrate(model, [x])
    with torch.no_grad():
        model.second.scale.mul_(0.83)
    qat.export_onnx(model.eval(), path, x)
    assert qat.verify_onnx(path, model, [x]).max_difference < 1e-6
    grids = {tensor.name: tensor.dims for tensor in onnx.load(path).graph.initializer}
    quantizers = [node for node in onnx.load(path).graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantizers) == 3 and not any(grids[node.input[1]] for node in quantizers)  # one scale for the tensor
