"""Sums at few bits give torch's integers in ONNX Runtime, bit by bit."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import qat
from qat.export import compare_layers, optimized_operators
from qat.training.config.schema import RunConfig
from qat.training.run.logging import RunLog
from qat.training.run.proof import Proof, export_and_prove
from tests.export.test_export_layers import quantized


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
    model = quantized(Block(), x, qat.QuantRecipe({"bits": 3}, {"bits": 3}, first_bits=8))
    with torch.no_grad():  # 0.1 m + 0.3 n lies on a tie of 0.2 for every other pair of integers
        for name, scale in (("stem_quantizer", 0.1), ("first_quantizer", 0.3), ("add_quantizer", 0.2)):
            model.get_submodule(name).scale.fill_(scale)
    qat.export_onnx(model, path, x)
    assert qat.verify_onnx(path, model, [x]).max_difference < 1e-6
    proto = onnx.load(path)
    sums = [node for node in proto.graph.node if node.op_type == "Sum"]
    assert len(sums) == 2 and "QLinearAdd" not in optimized_operators(path)
    for total in sums:
        total.op_type = "Add"
    onnx.save(proto, path)
    assert qat.verify_onnx(path, model, [x]).max_difference > 1e-3  # else the sums above would prove nothing


def _with_ties(x: torch.Tensor) -> torch.nn.Module:
    """8 bits, where 0.1 m + 0.3 n lies on a tie of 0.2 for every other pair of integers."""
    torch.manual_seed(0)
    model = quantized(Block(), x)
    with torch.no_grad():
        for name, scale in (("stem_quantizer", 0.01), ("first_quantizer", 0.03), ("add_quantizer", 0.02)):
            model.get_submodule(name).scale.fill_(scale)
    return model


def test_a_sum_on_a_far_finer_grid_than_its_operands_does_not_overflow(tmp_path: Path) -> None:
    """As too wide a step of an optimizer leaves it: all values of one operand are 0."""
    torch.manual_seed(0)
    x, path = torch.randn(16, 3, 16, 16), tmp_path / "model.onnx"
    model = _with_ties(x)
    with torch.no_grad():
        model.get_submodule("first_quantizer").scale.fill_(1e8)
    qat.export_onnx(model, path, x)
    assert not any(layer.beyond_ties for layer in compare_layers(path, model, x))


def test_all_sums_are_exact_if_asked_for(tmp_path: Path) -> None:
    x = torch.randn(16, 3, 16, 16)
    model = _with_ties(x)
    differences = []
    for exact in (False, True):
        path = tmp_path / f"{exact}.onnx"
        qat.export_onnx(model, path, x, exact_sums=exact)
        differences.append(qat.verify_onnx(path, model, [x]).max_difference)
        assert ("QLinearAdd" in optimized_operators(path)) is not exact
    assert differences[0] > 1e-3 > 1e-5 > differences[1]


@pytest.mark.parametrize(("wanted", "exact"), [("auto", True), ("never", False), ("always", True)])
def test_a_run_adds_exactly_where_integer_sums_change_predictions(
    wanted: str, exact: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(16, 3, 16, 16)
    model, config = _with_ties(x), RunConfig(export={"exact_sums": wanted})
    batches = [(x, model(x).detach().argmax(1))]
    proof = export_and_prove(model, tmp_path / "model.onnx", x, batches, config, {}, RunLog(tmp_path))
    assert (proof.results["agreement"] == 1) is exact
    assert ("QLinearAdd" in optimized_operators(tmp_path / "model.onnx")) is not exact
    assert ("sums are added in float32" in capsys.readouterr().out) is (wanted == "auto")
    assert sorted(path.name for path in tmp_path.glob("*.onnx")) == ["model.onnx"]


@pytest.mark.parametrize("second", [0.9, 0.8])
def test_exact_sums_that_change_nothing_are_not_taken(
    second: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They cost time: equal shares of equal predictions keep the integer ones, and the log says so."""
    found = iter([0.9, second])

    def prove(*given: object) -> Proof:
        return Proof({"agreement": next(found), "operators": {"QLinearAdd": 2}}, [], [])

    monkeypatch.setattr("qat.training.run.proof.prove", prove)
    x = torch.randn(4, 3, 8, 8)
    proof = export_and_prove(_with_ties(x), tmp_path / "model.onnx", x, [], RunConfig(), {}, RunLog(tmp_path))
    assert proof.results["agreement"] == 0.9 and "QLinearAdd" in optimized_operators(tmp_path / "model.onnx")
    said = f"sums stay integer ones: 90.00 % equal predictions, {100 * second:.2f} % with exact sums"
    assert said in capsys.readouterr().out
