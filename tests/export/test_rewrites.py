"""What is rewritten for ONNX Runtime: clips of integers, barriers around layers in float, the order of sums."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import qat
from qat.export import compare_layers, optimized_operators
from qat.export.onnxruntime.passes import fold_clips
from qat.training.config.schema import RunConfig
from qat.training.run.logging import RunLog
from qat.training.run.proof import Proof, export_and_prove
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain, draw


def exported(act: nn.Module, bits: int, path: Path, share: float = 1.0) -> tuple[nn.Module, Tensor]:
    """Two convolutions with a clip between them, whose grid ends at this share of what calibration found."""
    torch.manual_seed(0)
    x = 6 * torch.randn(8, 3, 12, 12)
    layers = OrderedDict(first=nn.Conv2d(3, 8, 3), act=act, second=nn.Conv2d(8, 4, 3))
    model = quantized(nn.Sequential(layers), x, qat.QuantRecipe({"bits": bits}, {"bits": bits}, residual_bits=bits))
    with torch.no_grad():
        for each in model.modules():
            if isinstance(each, qat.Quantizer) and each.role == "activation":
                each.scale.mul_(share)
    qat.export_onnx(model, path, x)
    return model, x


def clips(path: Path) -> Counter[str]:
    """How many Clips of floats and of integers the file has."""
    graph = onnx.load(path).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    kinds = [types[node.input[1]] == onnx.TensorProto.FLOAT for node in graph.node if node.op_type == "Clip"]
    return Counter("floats" if kind else "integers" for kind in kinds)


@pytest.mark.parametrize(("bits", "act", "share"), [
    (4, nn.ReLU6(), 1.0),
    (4, nn.ReLU6(), 0.5),  # the grid ends first
    (2, nn.ReLU6(), 3.0),  # the clip ends first
    (4, nn.Hardtanh(-1.0, 1.0), 3.0),
    (2, nn.Hardtanh(0.5, 2.0), 0.5),
], ids=str)  # fmt: skip
def test_the_integers_are_clipped(bits: int, act: nn.Module, share: float, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model, x = exported(act, bits, path, share)
    assert clips(path)["floats"] == 0
    found = compare_layers(path, model, x)
    assert found and not any(each.differing for each in found), found
    assert qat.verify_onnx(path, model, [x]).max_difference < 1e-5


GRAPH = """<ir_version: 10, opset_import: ["": 21]>
agraph (float[4, 2] x, float least) => (float[4, 2] y OTHER)
<float zero = {0}, float six = {6}, SCALE, uint8 none = {0}, uint8 most = {15}>
{
    clipped = Clip(x, LOW, six)
    wide = QuantizeLinear<axis = 1>(clipped, scale, POINT)
    codes = Clip(wide, none, most)
    y = DequantizeLinear<axis = 1>(codes, scale, POINT)
    MORE
}"""
DEFAULTS = {"OTHER": "", "LOW": "zero", "SCALE": "float scale = {0.5}", "POINT": "none", "MORE": ""}


@pytest.mark.parametrize(("changes", "stays"), [
    ({}, False),
    ({"OTHER": ", float[4, 2] clipped"}, True),  # others read the floats
    ({"OTHER": ", uint8[4, 2] wide"}, True),  # others read the integers before they are clipped
    ({"OTHER": ", float[4, 2] z", "MORE": "z = DequantizeLinear(wide, scale, none)"}, True),
    ({"LOW": "least"}, True),  # the bound is computed
    ({"SCALE": "float[2] scale = {0.5, 0.25}, uint8[2] points = {0, 0}", "POINT": "points"}, True),  # two grids
    ({"SCALE": "float[2] scale = {0.5, 0.5}, uint8[2] points = {3, 3}", "POINT": "points"}, False),
], ids=str)  # fmt: skip
def test_a_clip_stays_where_more_than_one_grid_would_change(changes: dict[str, str], stays: bool) -> None:
    text = GRAPH
    for name, default in DEFAULTS.items():
        text = text.replace(name, changes.get(name, default))
    proto = onnx.parser.parse_model(text)
    inputs = {"x": np.linspace(-3, 9, 8, dtype=np.float32).reshape(4, 2), "least": np.float32(0)}

    def answer() -> list[np.ndarray]:
        onnx.checker.check_model(proto)
        return ReferenceEvaluator(proto).run(None, inputs)

    before = answer()
    fold_clips(proto)
    assert [node.op_type for node in proto.graph.node].count("Clip") == 1 + stays
    assert all(map(np.array_equal, before, answer()))


def test_of_eight_bits_a_clip_stays_as_it_is(tmp_path: Path) -> None:
    """A Clip of integers between QuantizeLinear and DequantizeLinear is what other runtimes do not fuse."""
    exported(nn.ReLU6(), 8, tmp_path / "model.onnx")
    assert clips(tmp_path / "model.onnx") == {"floats": 1}


def beside(self: Any, x: Tensor) -> Tensor:
    """A layer and another one read the same integers, and both results are read as integers."""
    x = self.first(x).relu()
    return self.other((self.layer(x) + self.other(x)).relu())


def functional(self: Any, x: Tensor) -> Tensor:
    x = self.first(x).relu()
    return self.other((F.linear(x, self.layer.weight, self.layer.bias) + self.other(x)).relu())


def images(layer: nn.Module) -> tuple[nn.Module, Tensor]:
    parts = {"layer": layer, "other": nn.Conv2d(8, 8, 3, padding=1), "first": nn.Conv2d(3, 8, 3)}
    return Plain(beside, **parts), torch.randn(8, 3, 10, 10)


def rows(forward: Any, layer: nn.Module, *shape: int) -> tuple[nn.Module, Tensor]:
    return Plain(forward, layer=layer, other=nn.Linear(16, 16), first=nn.Linear(12, 16)), torch.randn(8, *shape, 12)


LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "conv": lambda: images(nn.Conv2d(8, 8, 3, padding=1)),
    "pool, conv": lambda: images(nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 8, 1))),
    "depthwise": lambda: images(nn.Conv2d(8, 8, 3, padding=1, groups=8)),
    "transposed": lambda: images(nn.ConvTranspose2d(8, 8, 3, padding=1)),
    "linear": lambda: rows(beside, nn.Linear(16, 16, bias=False)),
    "linear of tokens": lambda: rows(beside, nn.Linear(16, 16), 5),
    "functional linear": lambda: rows(functional, nn.Linear(16, 16)),
}


@pytest.mark.parametrize(("case", "target"), [
    *((case, "onnxruntime") for case in LAYERS),
    ("depthwise", "openvino"),
    ("conv", "tensorrt"),
    ("linear", "tensorrt"),
    ("conv", "put in after prepare"),
])  # fmt: skip
def test_a_layer_in_float_stays_float(case: str, target: Any, tmp_path: Path) -> None:
    """In a default session with all its optimisations, on the same integers; those of its neighbours stay integer."""
    torch.manual_seed(0)
    (net, x), path = LAYERS[case](), tmp_path / "model.onnx"
    if target == "put in after prepare":
        model = qat.prepare(net, example_inputs=x)
        model.set_submodule("layer", net.get_submodule("layer"))
    else:
        model = qat.prepare(net, qat.QuantRecipe(target=target, overrides={"layer": {"skip": True}}), x)
    qat.calibrate(model, [x])
    with torch.no_grad():  # one channel is far larger: on a grid of the whole tensor little is left of the others
        for name, weight in model.named_parameters():
            if name.startswith("layer") and weight.dim() > 1:
                weight[0] *= 30
    qat.export_onnx(model.eval(), path, x)
    found = compare_layers(path, model, x)
    assert found and not any(each.beyond_ties for each in found), found
    assert qat.verify_onnx(path, model, [x]).agreement == 1
    assert optimized_operators(path)["QLinearConv"] >= (2 if x.dim() == 4 and target != "tensorrt" else 0)


def test_a_layer_without_a_grid_in_front_of_it_needs_no_barrier(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    x = torch.randn(4, 3, 10, 10)
    model = quantized(net, x, qat.QuantRecipe(overrides={"0": {"skip": True}}))
    qat.export_onnx(model, tmp_path / "model.onnx", x)
    assert "LeakyRelu" not in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}


def block(self: Any, x: Tensor) -> Tensor:
    """Two sums: a convolution reads the first one, the second one and a convolution the other."""
    y = self.stem(x).relu()
    y = (y + self.first(y)).relu()
    return self.last((y + self.between(y)).relu())


PARTS = {"stem": nn.Conv2d(3, 8, 1), "first": nn.Conv2d(8, 8, 3, padding=1), "last": nn.Conv2d(8, 5, 1)}
SUMS = Plain(block, **PARTS, between=nn.Conv2d(8, 8, 1))


def with_ties(x: Tensor, unit: float = 0.01, recipe: qat.QuantRecipe | None = None) -> nn.Module:
    """Where (m + 3 n) units lie on a tie of 2 units for every other pair of integers."""
    torch.manual_seed(0)
    model = quantized(SUMS, x, recipe)
    with torch.no_grad():
        for name, units in (("stem_quantizer", 1), ("first_quantizer", 3), ("add_quantizer", 2)):
            model.get_submodule(name).scale.fill_(units * unit)
    return model


def test_a_sum_that_ends_on_few_bits_is_added_as_torch_adds(tmp_path: Path) -> None:
    x, path = draw(16, 3, 16, 16), tmp_path / "model.onnx"
    model = with_ties(x, 0.1, qat.QuantRecipe({"bits": 3}, {"bits": 3}, first_bits=8))
    qat.export_onnx(model, path, x)
    assert qat.verify_onnx(path, model, [x]).max_difference < 1e-6
    proto = onnx.load(path)
    sums = [node for node in proto.graph.node if node.op_type == "Sum"]
    assert len(sums) == 2 and "QLinearAdd" not in optimized_operators(path)
    for total in sums:
        total.op_type = "Add"
    onnx.save(proto, path)
    assert qat.verify_onnx(path, model, [x]).max_difference > 1e-3  # else the sums above would prove nothing


def test_a_sum_on_a_far_finer_grid_does_not_overflow(tmp_path: Path) -> None:
    """As too wide a step of an optimizer leaves it: all values of one operand are 0."""
    x, path = draw(16, 3, 16, 16), tmp_path / "model.onnx"
    model = with_ties(x)
    with torch.no_grad():
        model.get_submodule("first_quantizer").scale.fill_(1e8)
    qat.export_onnx(model, path, x)
    assert not any(layer.beyond_ties for layer in compare_layers(path, model, x))


@pytest.mark.parametrize("exact", [False, True])
def test_all_sums_are_exact_if_asked_for(exact: bool, tmp_path: Path) -> None:
    x, path = draw(16, 3, 16, 16), tmp_path / "model.onnx"
    model = with_ties(x)
    qat.export_onnx(model, path, x, exact_sums=exact)
    difference = qat.verify_onnx(path, model, [x]).max_difference
    assert difference < 1e-5 if exact else difference > 1e-3
    assert ("QLinearAdd" in optimized_operators(path)) is not exact


@pytest.mark.parametrize(("wanted", "exact"), [("auto", True), ("never", False), ("always", True)])
def test_a_run_adds_exactly_where_sums_change_predictions(wanted, exact, tmp_path, capsys):
    x = torch.randn(16, 3, 16, 16)
    model, config = with_ties(x), RunConfig(export={"exact_sums": wanted})
    batches = [(x, model(x).detach().argmax(1))]
    proof = export_and_prove(model, tmp_path / "model.onnx", x, batches, config, {}, RunLog(tmp_path))
    assert (proof.results["agreement"] == 1) is exact
    assert ("QLinearAdd" in optimized_operators(tmp_path / "model.onnx")) is not exact
    assert ("sums are added in float32" in capsys.readouterr().out) is (wanted == "auto")
    assert sorted(path.name for path in tmp_path.glob("*.onnx")) == ["model.onnx"]


@pytest.mark.parametrize("second", [0.9, 0.8])
def test_exact_sums_that_change_nothing_are_not_taken(second, tmp_path, monkeypatch, capsys):
    """They cost time: equal shares of equal predictions keep the integer ones, and the log says so."""
    found = iter([0.9, second])

    def prove(*given: object) -> Proof:
        return Proof({"agreement": next(found), "operators": {"QLinearAdd": 2}}, [], [])

    monkeypatch.setattr("qat.training.run.proof.prove", prove)
    x = torch.randn(4, 3, 8, 8)
    proof = export_and_prove(with_ties(x), tmp_path / "model.onnx", x, [], RunConfig(), {}, RunLog(tmp_path))
    assert proof.results["agreement"] == 0.9 and "QLinearAdd" in optimized_operators(tmp_path / "model.onnx")
    said = f"sums stay integer ones: 90.00 % equal predictions, {100 * second:.2f} % with exact sums"
    assert said in capsys.readouterr().out
