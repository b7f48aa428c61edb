"""When a program of evaluation is made, kept, and left: changes, NaN, other dtypes, results of one's own classes."""

import copy
import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.codes import evaluating
from qat.codes.graph import UNSETTLED, FusedGraph
from qat.export import verify_onnx
from qat.kernels.cpu import compiler, onednn
from tests.codes.test_evaluating import of_float, plainly, prepared, program_of
from tests.references.prepared_case import Plain

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="evaluation runs plainly without the C kernels")


def test_a_model_that_changes_at_every_forward_is_not_translated_each_time(monkeypatch, caplog):
    """Point 13: a counter on a layer cost a translation a batch, silently; standing still brings the program back."""
    model, x = prepared()
    made, program = [], evaluating.integer_program
    monkeypatch.setattr(evaluating, "integer_program", lambda model: made.append(None) or program(model))
    with torch.no_grad(), caplog.at_level(logging.INFO, "qat"):
        for count in range(10):
            model[0].count = count
            assert torch.equal(model(x), plainly(model, x))
        assert len(made) == 3
        said = [message for message in caplog.messages if "BatchNorms" not in message]
        assert said == [f"evaluation runs operation by operation: {UNSETTLED}"]
        model(x)
        model(x)
    assert len(made) == 4 and program_of(model) is not None


def test_nan_in_every_batch_is_not_tried_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """Point 13: every batch ran twice, on integers up to the NaN and then plainly."""
    model, x = prepared()
    spoilt = x.clone()
    spoilt[0, 0, 0, 0] = torch.nan
    with torch.no_grad(), caplog.at_level(logging.INFO, "qat"):
        model(x)
        for _ in range(4):
            found = model(spoilt)
            assert found[0].isnan().any() and torch.equal(found.isnan(), plainly(model, spoilt).isnan())
        assert program_of(model) is None
    assert [message for message in caplog.messages if "NaN" in message] == [
        "evaluation runs operation by operation: its integer program fails (the input of 'input_quantizer' contains"
        " NaN, which has no integer code)"
    ]


def test_another_default_dtype_changes_nothing() -> None:
    """Point 13: one evaluation under it ended evaluation on integers for good."""
    model, x = prepared()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            y = model(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert program_of(model) is not None
    assert torch.equal(y, plainly(model, x))


@dataclass
class Found:
    scores: Tensor
    features: Tensor


def two_results(self: Any, x: Tensor) -> Found:
    features = self.conv(x).relu()
    return Found(self.head(features.mean((2, 3))), features)


def test_a_dataclass_of_results_is_evaluated_on_integers_copied_and_exported(tmp_path: Path) -> None:
    """Point 45: "Boolean value of Tensor with more than one value is ambiguous" ended it; its file was refused."""
    x = torch.randn(4, 3, 8, 8)
    model = of_float(Plain(two_results, conv=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 2)), x)
    stored = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for each in (model, stored, copy.deepcopy(model)):
            found = each(x)
            assert type(found) is Found and program_of(each) is not None
            assert torch.equal(found.scores, plainly(model, x).scores)
    qat.export_onnx(model, tmp_path / "model.onnx", x)
    assert [end.name for end in onnx.load(tmp_path / "model.onnx").graph.output] == ["scores", "features"]
    assert verify_onnx(tmp_path / "model.onnx", model, [x]).close


def test_a_forward_that_draws_in_evaluation_draws_the_same_the_first_time(caplog: pytest.LogCaptureFixture) -> None:
    """Point 23, Monte Carlo dropout: the self-check drew too, and took other draws for an error."""

    def draws(self: Any, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(self.a(x).relu(), 0.3, training=True))  # type: ignore[no-any-return]

    x, seen = torch.randn(32, 8), []
    model = of_float(Plain(draws, a=nn.Linear(8, 16), b=nn.Linear(16, 3)), x)
    with torch.no_grad():
        for _ in range(2):
            torch.manual_seed(0)
            seen.append((model(x), torch.rand(3)))
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    assert not torch.equal(model(x), model(x)) and "runs operation by operation" not in caplog.text


def test_train_tries_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = prepared()
    for place, name in ((compiler, "library"), (onednn, "are_exact")):
        monkeypatch.setattr(place, name, lambda *_: pytest.fail("something was tried out in train()"))
    model.eval()
    model.train()


def test_a_model_that_is_moved_after_train_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared()
    model.train()(x)
    seen: list[object] = []
    original = FusedGraph._probe_devices

    def look(self: FusedGraph) -> None:
        original(self)
        seen.append({parameter.device.type for parameter in self.parameters()})

    monkeypatch.setattr(FusedGraph, "_probe_devices", look)
    model.double().float()
    assert seen == []
    nn.ModuleList([model]).to("meta")
    assert seen == [{"meta"}]
