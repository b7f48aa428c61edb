"""The results that layers compute from parameters alone are stored: Swin's continuous position bias."""

from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from test_export_layers import exported
from torch import Tensor, nn

import qat
from qat.export.onnxruntime.verification import compare_layers_and_outputs


class Biased(nn.Module):
    """Attention scores plus the output of a small network for a table of coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(6, 8), nn.Linear(5, 3)
        self.bias = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
        self.register_buffer("table", torch.randn(5, 5, 2))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.project(x)
        scores = rows @ rows.transpose(-2, -1) + self.bias(self.table).squeeze(-1)
        return self.head(F.softmax(scores, -1))


def test_the_result_is_stored_and_the_runtime_computes_the_same_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(4, 5, 6), tmp_path / "model.onnx"
    model = exported(path, Biased(), {"x": x})
    differences, outputs = compare_layers_and_outputs(path, model, x)
    assert {layer.name for layer in differences} == {"input_quantizer", "project_quantizer", "softmax_quantizer"}
    assert sum(layer.differing for layer in differences) == 0
    torch.testing.assert_close(*outputs[0])
    stored = {tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer}
    assert (64, 2) not in stored and (5, 5) in stored


class Masked(Biased):
    """The same through torch's attention, which asks for the type of the mask: a guard on what is stored."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.project(x)
        mixed = F.scaled_dot_product_attention(rows, rows, rows, attn_mask=self.bias(self.table).squeeze(-1))
        return self.head(mixed.transpose(-2, -1))


def test_a_guard_on_what_is_stored_keeps_none_of_it(tmp_path: Path) -> None:
    x, path = torch.randn(4, 5, 6), tmp_path / "model.onnx"
    model = exported(path, Masked(), {"x": x})
    assert (64, 2) not in {tuple(tensor.dims) for tensor in onnx.load(path).graph.initializer}
    assert qat.verify_onnx(path, model, [x]).agreement == 1.0
