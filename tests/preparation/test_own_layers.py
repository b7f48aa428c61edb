"""Models that hold quantized layers of one's own: `prepare` keeps them and places what is missing for integers."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat import QuantConv2d, QuantLinear, QuantSpec
from qat.export.onnxruntime.verification import compare_layers, optimized_operators
from qat.preparation.prepared_graph import PreparedGraph
from tests.references import prepared_case


def grids(bits: int) -> dict[str, QuantSpec]:
    return {"weight_spec": QuantSpec(bits=bits), "activation_spec": QuantSpec(bits=bits)}


class Plain(nn.Module):
    """The net of docs/training_loop.md: no class of this library but its layers."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = QuantConv2d(3, 16, 3, padding=1, **grids(bits)), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = QuantConv2d(16, 32, 3, stride=2, **grids(bits)), nn.BatchNorm2d(32)
        self.fc = QuantLinear(32, 10, **grids(bits))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A block whose input is read by two layers of one's own, each with a quantizer, and by the sum."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.stem, self.bn0 = QuantConv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv1, self.bn1 = QuantConv2d(8, 8, 3, padding=1, bias=False, **grids(bits)), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = QuantConv2d(8, 8, 3, padding=1, bias=False, **grids(bits)), nn.BatchNorm2d(8)
        self.side = QuantConv2d(8, 8, 1, **grids(bits))
        self.fc = QuantLinear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn0(self.stem(x)))
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = F.relu(y + x) + self.side(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


def images() -> Tensor:
    return torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def trained(net: nn.Module) -> Any:
    """In a loop of one's own, from ranges of data; weights and ranges learn."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(qat.parameter_groups(net, lr=0.05, weight_decay=0.0))
    qat.calibrate(net, [images()])
    for _ in range(3):
        loss = F.cross_entropy(net(torch.randn(8, 3, 12, 12)), torch.arange(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def prepared(net: nn.Module) -> Any:
    model = qat.prepare(net, example_inputs=images())
    qat.calibrate(model, [images()], only_missing=True)
    return model


def names_of(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(each, qat.Quantizer)]


@pytest.mark.parametrize(("make", "bits"), [(Plain, 8), (Residual, 4)])
def test_convolutions_are_integer_ones_on_the_trained_ranges(make: Any, bits: int, tmp_path: Path) -> None:
    net = trained(make(bits))
    before = copy.deepcopy(net.state_dict())
    model = prepared(net).eval()
    after = model.state_dict()
    assert isinstance(model, PreparedGraph) and before.keys() <= after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    path = tmp_path / "net.onnx"
    qat.export_onnx(model, path, images())
    convolutions = sum(isinstance(each, nn.Conv2d) for each in net.modules())
    found = optimized_operators(path)
    assert (found["QLinearConv"], found["QGemm"], found["QLinearGlobalAveragePool"]) == (convolutions, 1, 1)
    assert not {"Conv", "FusedConv", "BatchNormalization", "Gemm", "ReduceMean"} & found.keys()
    verified = qat.verify_onnx(path, model, [images()])
    assert (verified.agreement, verified.float_convolutions) == (1.0, 0)
    assert all(layer.beyond_ties == 0 for layer in compare_layers(path, model, images()))


def test_the_net_of_the_docs_answers_as_it_was_trained() -> None:
    """Each quantizer of its layers is the one that its tensor gets; what is new quantizes what was float before."""
    net = trained(Plain(8))
    model = prepared(net).eval()
    assert set(names_of(model)) - set(names_of(net)) == {"conv2_quantizer"}
    assert torch.allclose(model(images()), net(images()), atol=0.01)


def test_quantizers_of_one_tensor_with_the_same_range_become_one() -> None:
    """Trained apart they differ: then one is the tensor's, and the other stays behind it."""
    untrained = qat.prepare(Residual(8), example_inputs=images())
    assert untrained.conv1.input_quantizer is untrained.side.input_quantizer
    net = trained(Residual(8))
    assert not torch.equal(net.conv1.input_quantizer.scale, net.side.input_quantizer.scale)
    model = prepared(net)
    calls = {str(node.target): node for node in model.graph.nodes if node.op == "call_module"}
    assert calls["side.input_quantizer"].args[0].target == "conv1.input_quantizer"
    assert calls["side"].kwargs["input_quantizer"].target == "side.input_quantizer"


def test_quantizers_that_forward_calls_stay() -> None:
    net = prepared_case.Plain(lambda self, x: self.conv(F.relu(self.conv(F.relu(self.first(self.inputs(x)))))),
                              inputs=qat.quantizer.create_quantizer(QuantSpec(bits=8), "activation", ()),
                              conv=QuantConv2d(4, 4, 3, padding=1, activation_spec=QuantSpec(bits=6)),
                              first=nn.Conv2d(3, 4, 1))  # fmt: skip
    model: Any = qat.prepare(net, example_inputs=images())
    own = {"inputs", "conv.weight_quantizer", "conv.input_quantizer", "first.weight_quantizer"}
    assert set(names_of(model)) == own
    calls = [str(node.target) for node in model.graph.nodes if node.op == "call_module"]
    assert calls == ["inputs", "first", "conv.input_quantizer", "conv", "conv.input_quantizer", "conv"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_share_what_the_model_shares(copied: Callable[[Any], Any]) -> None:
    model = prepared(Residual(8)).eval()
    other = copied(model)
    assert other.conv1.input_quantizer is other.side.input_quantizer
    assert torch.equal(other(images()), model(images()))


def test_in_parts_too_layers_keep_their_quantizers() -> None:
    def decide(self: Any, x: Tensor) -> Any:
        x = self.first(x)
        return self.last(x if x.sum() > 0 else -x)

    net: Any = prepared_case.Plain(decide, first=QuantLinear(4, 4), last=QuantLinear(4, 2, activation_spec=None))
    qat.calibrate(net, [torch.randn(8, 4)])
    model: Any = qat.prepare(net, qat.QuantRecipe(activation={"bits": 6}), example_inputs=torch.randn(8, 4))
    assert model.first.input_quantizer.spec.bits == 8 and model.last.input_quantizer.spec.bits == 6
    assert torch.equal(model.first.input_quantizer.scale, net.first.input_quantizer.scale)


def test_an_override_of_ones_own_layers_alone_is_refused() -> None:
    said = "'conv1' is a quantized layer of your own, which keeps its grids; set its weight_spec and activation_spec"
    for pattern in ("conv1", "conv?", "type:Conv2d"):
        with prepared_case.refused(f"prepare: the recipe's pattern {pattern!r} has no effect: {said}"):
            qat.prepare(Plain(8), qat.QuantRecipe(overrides={pattern: {"weight": {"bits": 4}}}), images())


@pytest.mark.parametrize(("layer", "target", "said"), [
    (lambda: QuantConv2d(3, 4, 3), "tensorrt", "an unsigned activation does not run on tensorrt"),
    (lambda: QuantConv2d(3, 4, 3, weight_spec=QuantSpec(symmetric=False)), "onnxruntime", "use symmetric=True"),
])  # fmt: skip
def test_layers_that_cannot_become_integers_are_refused_by_name(layer: Any, target: Any, said: str) -> None:
    net = nn.Sequential(nn.Identity(), layer())
    with pytest.raises(ValueError, match=rf"^prepare: '1.*{said}"):
        qat.prepare(net, qat.QuantRecipe(target=target), torch.ones(2, 3, 8, 8))


def test_only_missing_leaves_weights_and_activations_alone() -> None:
    net = Plain(8)
    qat.calibrate(net, [images()])
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        net.conv2.weight.mul_(3)
    net.fc = QuantLinear(32, 10)
    qat.calibrate(net, [images()], only_missing=True)
    assert torch.equal(net.conv2.weight_quantizer.scale, before["conv2.weight_quantizer.scale"])
    assert torch.equal(net.conv2.input_quantizer.scale, before["conv2.input_quantizer.scale"])
    assert net.fc.input_quantizer.is_calibrated


SAID = (
    "{} in float in an exported file, since no quantizer reads the result right behind norm and activation;"
    " qat.prepare(model) keeps your layers with their ranges, and places what is missing"
)


def test_what_computes_in_float_is_said_and_counted(tmp_path: Path) -> None:
    net, path = trained(Plain(8)), tmp_path / "net.onnx"
    said = SAID.format("conv1, conv2 compute")
    assert ", 2 layers in float; " in qat.summary(net) and qat.summary(net).splitlines()[-1] == said
    with pytest.warns(UserWarning) as warned:
        qat.export_onnx(net, path, images())
    assert [str(each.message) for each in warned] == [f"export_onnx: {said}"]
    assert sum(node.op_type == "Conv" for node in onnx.load(path).graph.node) == 2
    assert qat.verify_onnx(path, net, [images()]).float_convolutions == 2


def test_only_results_that_no_quantizer_reads_are_said() -> None:
    convs = (QuantConv2d(3, 4, 3), nn.ReLU(), QuantConv2d(4, 4, 3), nn.ReLU())
    net = nn.Sequential(*convs, nn.Flatten(), QuantLinear(256, 2))
    assert "in float in an exported file" not in qat.summary(net)  # ReLU, and flatten, keep the grid
    net.insert(3, nn.BatchNorm2d(4))
    assert qat.summary(net).splitlines()[-1] == SAID.format("2 computes")
