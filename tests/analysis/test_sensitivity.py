"""`sensitivity`: each layer alone and left out, shared and unread quantizers, and that nothing stays switched."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.quantizer import Quantizer


class Net(nn.Module):
    """Two layers read the stem's result, and a sum and a mean read three that no layer reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.stem(x)))
        return self.head(torch.relu(self.left(y) + self.right(y)).mean((2, 3)))


def images() -> Tensor:
    return torch.randn(32, 3, 10, 10, generator=torch.Generator().manual_seed(0))


def prepared(**overrides: Any) -> tuple[nn.Module, nn.Module]:
    float_model = Net().train()
    float_model(images())  # statistics that fold to something
    float_model.eval()
    model = qat.prepare(copy.deepcopy(float_model), qat.QuantRecipe(overrides=overrides), images())
    qat.calibrate(model, [images()])
    return float_model, model


def switches(model: nn.Module) -> dict[str, bool]:
    return {name: each.is_disabled for name, each in model.named_modules() if isinstance(each, Quantizer)}


def total(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(images()).double().square().sum())


@pytest.mark.parametrize("bad", ["stem", "right", "head"])
@pytest.mark.parametrize("part", ["weight", "activation"])
def test_the_layer_with_two_bits_comes_out_first(bad: str, part: str) -> None:
    float_model, model = prepared(**{bad: {part: {"bits": 2}}})
    expected = float_model(images()).detach()

    def evaluate(switched: nn.Module) -> dict[str, float]:
        assert not switched.training and not torch.is_grad_enabled()
        return {"closeness": -float((switched(images()).detach() - expected).abs().mean())}

    found = qat.sensitivity(model.train(), evaluate)
    assert model.training and not any(switches(model).values())
    assert found["float"]["closeness"] == pytest.approx(0, abs=1e-5)
    with torch.no_grad():
        assert found["baseline"] == evaluate(model.eval())
    rows = {row["name"]: row for row in found["layers"]}
    worst = min(rows, key=lambda name: rows[name]["only"]["both"]["closeness"])
    freed = max(rows, key=lambda name: rows[name]["all_but"]["both"]["closeness"])
    alike = {"left", "right"} if part == "activation" and bad == "right" else {bad}
    assert worst in alike and freed in alike
    other = {"weight": "activation", "activation": "weight"}[part]
    only = rows[bad]["only"]
    assert only[part]["closeness"] < 3 * only[other]["closeness"] < 0


def test_rows_stand_in_the_order_of_execution_and_what_no_layer_reads_has_its_own() -> None:
    _, model = prepared()
    found = qat.sensitivity(model, lambda model: 0.0)
    rows = {row["name"]: row for row in found["layers"]}
    layers = [name for name in rows if name in ("stem", "left", "right", "head")]
    assert layers == ["stem", "left", "right", "head"]
    assert set(rows["stem"]["only"]) == {"weight", "activation", "both"}
    unread = [row for name, row in rows.items() if name not in layers]
    assert len(unread) == 3 and all(set(row["only"]) == set(row["all_but"]) == {"activation", "both"} for row in unread)


def test_a_row_is_the_model_with_these_switches() -> None:
    _, model = prepared(stem={"weight": {"bits": 3}})
    model.eval()
    found = qat.sensitivity(model, total)
    row = next(row for row in found["layers"] if row["name"] == "left")
    with qat.disable_fake_quant(model), qat.enable_fake_quant(model, "left", activations=False):
        assert row["only"]["weight"] == total(model)
    with qat.disable_fake_quant(model, "left"):
        assert row["all_but"]["both"] == total(model)


def test_switches_are_put_back_after_an_error_and_what_was_off_stays_off() -> None:
    _, model = prepared()
    qat.disable_fake_quant(model, "head")
    before = switches(model)
    seen = []

    def evaluate(switched: nn.Module) -> float:
        seen.append(switches(switched))
        return 1 / (8 - len(seen))

    with pytest.raises(ZeroDivisionError):
        qat.sensitivity(model.train(), evaluate)
    assert switches(model) == before and model.training
    assert all(each["head.weight_quantizer"] for each in seen)
    rows = qat.sensitivity(model, lambda model: 1)["layers"]
    assert "head" not in [row["name"] for row in rows]


def test_a_model_without_quantizers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no quantizer in use; call qat.prepare first$"):
        qat.sensitivity(nn.Linear(2, 2), lambda model: 1.0)


def test_layers_of_attention_have_rows() -> None:
    x = torch.randn(2, 5, 8)
    model = qat.prepare(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), example_inputs=x)
    qat.calibrate(model, [x])
    seen: list[int] = []

    def progress(jobs: list[Any]) -> list[Any]:
        seen.append(len(jobs))
        return jobs

    rows = qat.sensitivity(model, lambda model: model(x).sum(), progress)["layers"]
    assert {"linear1", "linear2"} < {row["name"] for row in rows} and len(rows) > 6
    assert seen == [2 + sum(2 * (1 if len(row["only"]) == 2 else 3) for row in rows)]
