"""Models that torch.fx cannot trace as a whole: their largest traceable parts, then single layers."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import qat
from qat.layers import QuantLayer
from qat.preparation.parts import prepared_parts
from qat.preparation.report import LEFT_IN_FLOAT, noted
from qat.quantizer import Quantizer
from tests.references.prepared_case import (
    Plain,
    activation_quantizers,
    assert_computes_as,
    draw,
    refused,
    without_quantizers,
)

CONTROL_FLOW = (
    "the way through it depends on the values of a tensor (test_parts.py, line 47); torch.where(condition, a, b) takes"
    " both ways"
)


class Detector(nn.Module):
    """Like detection models: images in a list, decisions on values, a body and heads that can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.body.out_channels = 4
        self.heads = nn.ModuleDict({"box": nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 4))})
        self.score = nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.hooked = nn.Linear(4, 4)
        self.hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
        self.unused = nn.Linear(4, 4)

    def forward(self, images: list[Tensor], targets: list[int] | None = None) -> dict[str, Tensor]:
        x = self.body(torch.stack(images))
        if not bool(x.isfinite().all()):
            raise RuntimeError("not finite")
        tokens = x.flatten(2).mT
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        pooled = tokens.mean(1) * self.body.out_channels
        found = {"boxes": self.heads["box"](x), "scores": self.score(self.hooked(pooled))}
        return {**found, "loss": found["scores"].square().mean()} if self.training and targets is not None else found


IMAGES = [draw(3, 8, 8, seed=1), draw(3, 8, 8, seed=2)]


def test_the_largest_parts_that_can_be_traced_are() -> None:
    net = Detector().eval()
    model = qat.prepare(net, example_inputs=(IMAGES,))
    assert list(prepared_parts(model)) == ["body", "heads.box"]
    assert all(isinstance(part, fx.GraphModule) for part in prepared_parts(model).values())
    assert noted(model, LEFT_IN_FLOAT) == {
        "(the model)": f"prepared in parts, since Detector cannot be captured: {CONTROL_FLOW}",
        "hooked": "it carries forward hooks, which the twin would lose",
        "unused": "forward never calls it for the example inputs",
    }
    # Within a part, tensors are quantized at their producers; a single layer quantizes its input.
    names = activation_quantizers(model)
    assert {"body.input_quantizer", "body.0_quantizer", "score.input_quantizer"} <= set(names)
    assert isinstance(model.get_submodule("attention.out_proj"), QuantLayer)
    assert not isinstance(model.get_submodule("hooked"), QuantLayer)


@pytest.mark.parametrize("example_inputs", [(IMAGES,), None], ids=["example", "no example"])
def test_a_model_in_parts_computes_as_the_float_model(example_inputs: Any) -> None:
    net = Detector().eval()
    before = copy.deepcopy(net.state_dict())
    model = qat.prepare(net, example_inputs=example_inputs)
    assert type(model) is Detector and model is not net
    assert_computes_as(net, model, IMAGES)
    # The rest of the model still decides and branches at every call: training with targets gives a loss.
    assert set(without_quantizers(model).train()(IMAGES, [1])) == {"boxes", "scores", "loss"}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(isinstance(module, (Quantizer, QuantLayer, fx.GraphModule)) for module in net.modules())


class Counts(nn.Module):
    """Picklable; it decides on a value, and uses one body under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.again = self.body
        self.inner = nn.ModuleList([nn.Linear(8, 8), self.body])
        self.steps = 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps + int(x.sum() > 1e9)):
            x = self.inner[1](self.inner[0](self.again(self.body(x))))
        return x


def test_a_part_under_several_names_stays_one_part() -> None:
    net, x = Counts().eval(), draw(4, 8)
    model = qat.prepare(net, example_inputs=x)
    assert model.again is model.body and model.inner[1] is model.body
    assert sum(isinstance(module, QuantLayer) for module in model.modules()) == 2
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert_computes_as(net, model, x)
    qat.calibrate(model, [x])
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_names_in_a_recipe_are_those_of_the_whole_model() -> None:
    overrides = {
        "body.3": {"skip": True},
        "heads.box.1": {"weight": {"bits": 4}, "activation": {"bits": 6}},
        "score": {"weight": {"bits": 3}, "activation": {"bits": 5}},
    }
    model = qat.prepare(Detector(), qat.QuantRecipe(overrides=overrides), example_inputs=(IMAGES,))
    assert noted(model, LEFT_IN_FLOAT)["body.3"] == "skipped by the recipe's pattern 'body.3'"
    box = model.get_submodule("heads.box")
    assert box.get_submodule("1").weight_quantizer.spec.bits == 4 and box.input_quantizer.spec.bits == 6
    assert model.score.weight_quantizer.spec.bits == 3 and model.score.input_quantizer.spec.bits == 5
    with refused(
        "prepare: the recipe's pattern 'heads.bx.*' names no layer of the model; did you mean 'heads.box.3' or"
        " 'heads.box.1'?"
    ):
        qat.prepare(Detector(), qat.QuantRecipe(overrides={"heads.bx.*": {"skip": True}}), example_inputs=(IMAGES,))


class Head(nn.Module):
    """A head that also computes its loss, like RetinaNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def compute_loss(self, scores: Tensor) -> Tensor:
        return scores.square().mean()


def test_a_part_whose_methods_others_call_keeps_them() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            return x
        scores = self.head(x)
        return self.head.compute_loss(scores) if self.training and bool(scores.isfinite().all()) else scores.relu()

    net, x = Plain(forward, head=Head()).eval(), draw(4, 8)
    model = qat.prepare(net, example_inputs=x)
    assert isinstance(model.get_submodule("head.fc"), QuantLayer)
    assert_computes_as(net, model, x)


VALUES: dict[str, Any] = {
    "if": lambda self, x: self.a(x) if x.sum() > 0 else self.b(x),
    "float": lambda self, x: self.a(x) * float(x.abs().max()),
    "list": lambda self, x: self.a(x) * torch.tensor(x.tolist()).max(),
}


@pytest.mark.parametrize("case", VALUES)
def test_control_flow_on_values_is_decided_at_every_call(case: str) -> None:
    net = Plain(VALUES[case], a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    model = qat.prepare(net, example_inputs=draw(4, 8).abs())
    assert any(isinstance(module, QuantLayer) for module in model.modules())
    for x in (draw(4, 8).abs(), -draw(4, 8).abs(), draw(4, 8, seed=3)):
        assert_computes_as(net, model, x)
