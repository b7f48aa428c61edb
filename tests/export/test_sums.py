"""Sums at few bits give torch's integers in ONNX Runtime, bit by bit."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import qat
from qat.export import optimized_operators

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Block(nn.Module):
    """Two sums: a convolution reads the first one, the second one and a convolution the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 5, 1)
        self.between = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x).relu()
        y = (y + self.first(y)).relu()
        return self.last((y + self.between(y)).relu())


def test_a_sum_that_ends_on_few_bits_is_added_as_torch_adds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(16, 3, 16, 16), tmp_path / "model.onnx"
    model = qat.prepare(Block(), qat.QuantRecipe({"bits": 3}, {"bits": 3}, first_bits=8), x)
    qat.calibrate(model, [x])
    with torch.no_grad():  # 0.1 m + 0.3 n lies on a tie of 0.2 for every other pair of integers
        for name, scale in (("stem_quantizer", 0.1), ("first_quantizer", 0.3), ("add_quantizer", 0.2)):
            model.get_submodule(name).scale.fill_(scale)
    qat.export_onnx(model.eval(), path, x)
    assert qat.verify_onnx(path, model, [x]).max_difference < 1e-6
    proto = onnx.load(path)
    sums = [node for node in proto.graph.node if node.op_type == "Sum"]
    assert len(sums) == 2 and "QLinearAdd" not in optimized_operators(path)
    for total in sums:
        total.op_type = "Add"
    onnx.save(proto, path)
    assert qat.verify_onnx(path, model, [x]).max_difference > 1e-3  # else the sums above would prove nothing


def test_a_sum_that_is_read_as_it_is_stays_an_integer_one(tmp_path: Path) -> None:
    x, path = torch.randn(16, 3, 16, 16), tmp_path / "model.onnx"
    model = qat.prepare(Block(), qat.QuantRecipe(), x)
    qat.calibrate(model, [x])
    qat.export_onnx(model.eval(), path, x)
    assert "QLinearAdd" in optimized_operators(path)
