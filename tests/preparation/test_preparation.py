"""`prepare`: its result, what stays float and why, and what it refuses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.layers import QuantLayer
from qat.preparation.report import LEFT_IN_FLOAT, noted
from qat.quantizer import Quantizer, create_quantizer, registered_quantizers
from qat.workflow import probe
from tests.references.prepared_case import (
    Net,
    Plain,
    assert_close_to_float,
    assert_computes_as,
    assert_takes_float_state,
    draw,
    refused,
)


def test_the_float_model_is_untouched_and_its_keys_stay() -> None:
    net = Net().eval()
    before = copy.deepcopy(net.state_dict())
    model = qat.prepare(net)
    assert not any(isinstance(module, (Quantizer, QuantLayer)) for module in net.modules())
    qat.calibrate(model, [torch.randn(2, 3, 8, 8)])
    with torch.no_grad():
        model.stem.weight.add_(1)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    assert set(before) < set(model.state_dict())
    assert_takes_float_state(model, before)
    assert not model.training and model.block.bn1 is model.get_submodule("block.bn1")


class Scorer(nn.Module):
    """A typical user model: layers in lists and dicts, functions between them, several inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, stride=2, padding=1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(6), nn.GroupNorm(2, 6)])
        self.heads = nn.ModuleDict({"score": nn.Linear(12, 4), "gate": nn.Linear(6, 6)})
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, extra: Tensor) -> dict[str, Tensor]:
        x = image
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x)), 0.1)
        gate = torch.sigmoid(self.heads["gate"](F.adaptive_avg_pool2d(x, 1).flatten(1)))
        x = x * gate[:, :, None, None] + F.interpolate(x[..., ::2, ::2], size=x.shape[-2:], mode="nearest")
        x = torch.cat([F.max_pool2d(x, 2).amax((2, 3)), extra], dim=1)
        logits = self.heads["score"](F.normalize(x, dim=1)) / self.temperature
        return {"logits": logits, "probabilities": logits.softmax(-1), "gate": gate}


def test_a_plain_module_of_a_user() -> None:
    net = Scorer().eval()
    inputs = {"image": draw(4, 3, 8, 8), "extra": draw(4, 6, seed=1)}
    model = qat.prepare(net, example_inputs=inputs)
    assert_computes_as(net, model, **inputs)
    assert sum(isinstance(module, QuantLayer) for module in model.modules()) == 4
    assert noted(model, LEFT_IN_FLOAT) == {
        "norms.1": "GroupNorm computes in float", "temperature": "truediv reads it as a plain tensor",
    }  # fmt: skip
    assert_close_to_float(net, model, inputs)


class OddOnes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.twice = Doubles(3, 4, 1)
        self.unused = nn.Linear(4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.hooked = nn.Linear(4, 2)
        self.hooked.register_forward_hook(lambda module, inputs, output: output + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.twice(self.first(self.last(x)))))
        return self.hooked(x.mean((2, 3)))


class Doubles(nn.Conv2d):
    """A convolution that computes with a different weight."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv2d(x, 2 * self.weight, self.bias)


def test_what_stays_float_says_why() -> None:
    recipe = qat.QuantRecipe(overrides={"fir*": {"skip": True}})
    model = qat.prepare(OddOnes(), recipe, example_inputs=torch.randn(1, 3, 4, 4))
    assert noted(model, LEFT_IN_FLOAT) == {
        "first": "skipped by the recipe's pattern 'fir*'",
        "unused": "forward never calls it: unused, or its weight is read by a function",
        "norm": "no quantized convolution directly before it",
        "hooked": "it carries forward hooks, which the twin would lose",
    }
    table = qat.summary(model)
    assert "stays float: skipped by the recipe's pattern 'fir*'" in table
    assert "2 quantized layers, 4 activation quantizers, 4 layers in float;" in table


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "integer_only"])
def test_the_summary_names_what_computes_in_float_between_layers(target: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1))
    profile = qat.targets.profile_of(target)
    model = qat.prepare(nn.Sequential(net, nn.Sigmoid()), qat.QuantRecipe(target=target))
    said = [line for line in qat.summary(model).splitlines() if "between the layers" in line]
    named = {"onnxruntime": "2 hardswish", "tensorrt": "2 hardswish, 1 sigmoid"}.get(target)
    reason = profile.reasons["float_operations"].text
    assert said == ([f"{target} computes {named} between the layers in float: {reason}"] if named else [])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: qat.prepare(Net(), torch.randn(1, 3, 8, 8)),
            "prepare: recipe must be a QuantRecipe, got Tensor; inputs are given by name, prepare(model,"
            " example_inputs=...)",
        ),
        (lambda: qat.prepare(nn.Sequential(nn.ReLU())), "prepare: Sequential has no layer to quantize"),
        (
            lambda: qat.prepare(Net(), qat.QuantRecipe(overrides={"block.cnv1": {"skip": True}})),
            "prepare: the recipe's pattern 'block.cnv1' names no layer of the model; did you mean 'block.conv1' or"
            " 'block.conv2'?",
        ),
        (
            lambda: qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(rule="lqs"))),
            f"prepare: stem (weight): unknown quantizer 'lqs'; registered: {', '.join(registered_quantizers())};"
            " did you mean 'lsq'?",
        ),
        (
            lambda: qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(granularity="group", group_size=2))),
            "prepare: stem (weight): group_size=2 does not divide the weight's 3 inputs; use 1, 3",
        ),
    ],
)  # fmt: skip
def test_errors_are_sentences(make: Callable[[], Any], sentence: str) -> None:
    with refused(sentence, (ValueError, TypeError)):
        make()


def test_the_probe_names_quantizers_that_never_run() -> None:
    model = qat.prepare(Net())
    model.add_submodule("orphan", create_quantizer(qat.QuantSpec()))
    with pytest.raises(ValueError, match=r"^prepare: these quantizers never run: orphan$"):
        probe(model, {"x": torch.randn(1, 3, 8, 8)}, set())


@pytest.mark.filterwarnings("ignore:a quantizer")
def test_summary_lists_every_layer_in_order() -> None:
    model = qat.prepare(Net())
    lines = qat.summary(model).splitlines()
    names = [line.split()[0] for line in lines[1:-2]]
    assert names == [
        "input_quantizer", "stem", "stem_quantizer", "block.conv1", "block.conv1_quantizer", "block.conv2",
        "block.conv2_quantizer", "block.add_quantizer", "adaptive_avg_pool2d_quantizer", "fc",
    ]  # fmt: skip
    assert lines[1].endswith("not calibrated")
    assert lines[4].endswith("input: stem_quantizer, folds block.bn1")
    qat.calibrate(model, [torch.randn(1, 3, 8, 8)])
    assert "not calibrated" not in qat.summary(model)


# torch 2.11's compiler makes an instance of a Function and warns about itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_runs_under_torch_compile_without_a_graph_break() -> None:
    model = qat.prepare(Net().eval())
    x = torch.randn(2, 3, 8, 8)
    qat.calibrate(model, [x])
    for mode in (model.eval(), model.train()):
        compiled = torch.compile(mode, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), mode(x))
        gradients = [gradients_of(run, x) for run in (mode, compiled)]
        for name, eager in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], eager, rtol=1e-4, atol=1e-5, msg=name)
        torch._dynamo.reset()


def gradients_of(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    model = getattr(run, "_orig_mod", run)
    model.zero_grad()
    run(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("init", ["minmax", "percentile", "mse", "lsq"])
def test_a_weights_grid_without_negatives_refuses_negative_weights(init: Any) -> None:
    with pytest.raises(ValueError, match=r"^prepare: stem \(weight\): values down to -\d\.\d+, which its grid"):
        qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(signed=False, init=init)))


def test_a_grid_without_negatives_refuses_negative_values() -> None:
    recipe = qat.QuantRecipe(activation=qat.QuantSpec(signed=False, symmetric=True))
    model = qat.prepare(Net().eval(), recipe)
    with pytest.raises(ValueError, match=r"^calibrate: quantizer '[\w.]+': values down to -\d\.\d+, which its grid"):
        qat.calibrate(model, [torch.randn(2, 3, 8, 8)])


def test_answers_that_activations_wrote_share_no_memory() -> None:
    """The quantizer of a tensor that an in-place activation changes, and that the model returns, is read."""

    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        y = self.a(x)
        return {"0": y, "1": self.b(y)}

    blocks = {
        name: nn.Sequential(nn.Conv2d(inputs, 8, 1), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
        for name, inputs in (("a", 3), ("b", 8))
    }
    model: Any = qat.prepare(Plain(forward, **blocks), example_inputs=torch.randn(2, 3, 4, 4))
    calls = [node for node in model.graph.nodes if str(node.target).endswith("_quantizer") and node.op == "call_module"]
    assert len(calls) == 4 and all(node.users for node in calls)
