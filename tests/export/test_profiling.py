"""Milliseconds of layers in ONNX Runtime: whose time each operator's is."""

from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from torch import nn

import qat
from qat.export.onnxruntime.profiling import _owners, layer_milliseconds


def _node(name: str, reads: str, writes: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, input=reads.split(), output=writes.split())


def test_an_operator_counts_to_the_first_layer_behind_it() -> None:
    nodes = [
        _node("quantize", "x", "a"),
        _node("conv_token_1", "a w1", "b"),
        _node("transpose", "b", "c"),  # for the skip, which only the last layer reads; it runs before conv_1
        _node("conv_1_token_12", "b w2", "d"),
        _node("add", "c d", "e"),
        _node("linear", "e w3", "f"),
        _node("softmax", "f", "g"),
    ]
    found = _owners(nodes, {"conv": "first", "conv_1": "second", "linear": "third"})
    assert found == {
        "quantize": "first", "conv_token_1": "first", "transpose": "third", "conv_1_token_12": "second",
        "add": "third", "linear": "third", "softmax": "third",
    }  # fmt: skip


class Tokens(nn.Module):
    """Linear layers on three axes, whose weights the runtime transposes under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.down(F.relu(self.up(x))).mean(1))
        return y


NETS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "blocks": (
        nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)), nn.Flatten(),
            nn.Linear(4 * 16, 5),
        ), (2, 3, 8, 8),
    ),
    "transposed": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)), (2, 3, 8, 8),
    ),
    "tokens": (Tokens(), (2, 5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_layer_of_a_file_has_its_time(name: str, bits: int, tmp_path: Path) -> None:
    net, shape = NETS[name]
    x = torch.randn(shape)
    model = qat.prepare(net.eval(), qat.QuantRecipe(weight=qat.QuantSpec(bits=bits)), x)
    qat.calibrate(model, [x])
    qat.export_onnx(model.eval(), tmp_path / "net.onnx", x)
    found = layer_milliseconds(tmp_path / "net.onnx", x, rounds=3)
    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    assert list(found) == [each for each, module in net.named_modules() if isinstance(module, kinds)]
    assert min(found.values()) > 0


def test_a_file_without_quantized_layers_is_refused(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "float",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), tmp_path / "float.onnx")
    with pytest.raises(ValueError, match=r"float\.onnx has no weights on a grid"):
        layer_milliseconds(tmp_path / "float.onnx", torch.zeros(2))
