"""The integers alone: they know no file format, and torch computes the model from them."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat import integers
from qat.integers.evaluation import evaluation_copy
from qat.integers.freezing import freeze, frozen_grids
from qat.integers.frozen import FrozenLayer, FrozenParameter, FrozenTable, Operations
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain, draw

SOURCES = sorted(Path(integers.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_integers_know_no_file_format(path: Path) -> None:
    code = ast.parse(path.read_text())
    names = [getattr(node, key, "") for node in ast.walk(code) for key in ("module", "name", "id", "attr")]
    assert not [name for name in names if "onnx" in (name or "")]


class Everything(nn.Module):
    """One layer for each way of freezing, one layer that is called twice, and a parameter as an operand."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 4, bidirectional=True, batch_first=True)
        self.up = nn.Sequential(nn.ConvTranspose1d(5, 6, 2, groups=1), nn.BatchNorm1d(6))
        self.twice = nn.Linear(9, 9)
        self.mix = nn.Linear(9, 7)
        self.table = nn.Parameter(draw(7, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = self.lstm(x + self.attention(x, x, x, need_weights=False)[0])[0]
        x = torch.relu(self.up(x))
        return self.mix(self.twice(torch.relu(self.twice(x)))) @ self.table


def test_torch_computes_the_model_from_its_integers() -> None:
    torch.manual_seed(0)
    x = torch.arange(20).reshape(4, 5) % 9
    model = quantized(Everything(), {"x": x})
    frozen = freeze(evaluation_copy(model), Operations())
    assert {FrozenLayer, FrozenParameter, FrozenTable} <= {type(module) for module in frozen.modules()}
    with torch.no_grad():
        for parameter in frozen.parameters():
            parameter.fill_(torch.nan)  # no value comes from a float weight or a learned scale
        torch.testing.assert_close(frozen(x), model(x), rtol=1e-5, atol=1e-5)
    assert {"words_quantizer", "mix_quantizer", "lstm.product_ih_l0.input_quantizer"} <= set(frozen_grids(frozen))


def test_values_that_vanish_give_no_nan_and_a_nan_names_its_layer() -> None:
    """Point 95: the product of two scales was 0, and so a bias was 0 / 0."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    for small in (1e-8, 1e-20, 1e-33, 1e-40):
        nn.init.constant_(net[0].weight, small)
        nn.init.constant_(net[0].bias, small)
        model, x = qat.prepare(net, example_inputs=torch.ones(2, 3, 9, 9)), torch.rand(2, 3, 9, 9)
        qat.calibrate(model, [x])
        with torch.no_grad():
            found = model.eval()(x)
            torch.testing.assert_close(found, net(x), rtol=0.05, atol=1e-3)
            torch.testing.assert_close(qat.convert(model)(x), found, rtol=1e-5, atol=1e-7)
    folded = quantized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), {"input": torch.rand(2, 3, 9, 9)})
    folded.get_submodule("1").running_var.fill_(-1)
    with pytest.raises(ValueError, match=r"^convert: '0': its bias, BatchNorm folded in, holds NaN or infinity$"):
        qat.convert(folded)


def test_calls_that_no_result_reads_have_no_grid() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first = self.act(x)  # into its input, so the module stays; the second call becomes a product of two grids
        self.b(self.act(self.a(first)))
        return first

    model = quantized(Plain(forward, act=nn.SiLU(True), a=nn.Linear(4, 4), b=nn.Linear(4, 4)), {"x": draw(2, 4)})
    assert "act.mul_quantizer" in dict(model.named_modules())
    assert list(frozen_grids(freeze(evaluation_copy(model), Operations()))) == ["act_quantizer"]
