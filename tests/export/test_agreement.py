"""Which answers of a file are the model's: classes, values, integers; near-ties explain others, or another function."""

import copy
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.export import Differences, compare_layers, explain_differences
from qat.export import exporter as exporter_module
from qat.export.agreement import TOLERANCE, verdict_on
from qat.quantizer import create_quantizer
from qat.training.run.proof import prove
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain, refused

VALUES = torch.linspace(-1, 3, 200)


@pytest.mark.parametrize("shape", [(200,), (200, 1), (2, 1, 10, 10), (100, 1, 2)])
def test_values_are_equal_within_a_share_of_their_range(shape: tuple[int, ...]) -> None:
    ours = VALUES.reshape(shape)
    assert verdict_on([([ours], [ours + 0.99 * TOLERANCE * 4], None)]).agreement == 1.0
    assert verdict_on([([ours], [ours + 1.01 * TOLERANCE * 4], None)]).agreement == 0.0
    half = torch.where(torch.arange(200).reshape(shape) % 2 == 0, ours, -ours - 1)
    assert verdict_on([([ours], [half], None)]).agreement == pytest.approx(0.5, abs=0.02)


def test_the_range_is_that_of_all_batches() -> None:
    """The values arrive one at a time, as from a model with a batch of one."""
    pairs = [([x.reshape(1, 1)], [x.reshape(1, 1) + 0.03], None) for x in VALUES]
    assert verdict_on(list(pairs)).agreement == 1.0 and verdict_on(pairs[:3]).agreement == 0.0


FIVES, LARGE = torch.full((4, 1), 5.0), torch.tensor([2**24, 2**24 + 1])
MASK, OTHER = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]]), torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])


PAIRS = [
    (FIVES, FIVES + 2e-5, 1.0),
    (FIVES, FIVES + 2e-4, 0.0),
    (LARGE, LARGE.flip(0), 0.0),
    # Read as classes, masks would agree wherever the largest value has the same index.
    *((MASK.to(dtype), OTHER.to(dtype), 0.75) for dtype in (torch.int64, torch.bool, torch.uint8)),
]


@pytest.mark.parametrize(("ours", "theirs", "agreement"), PAIRS)
def test_constants_integers_and_masks_have_to_be_the_same(ours: Tensor, theirs: Tensor, agreement: float) -> None:
    assert verdict_on([([ours], [theirs], None)]).agreement == agreement


def test_the_output_that_agrees_least_counts() -> None:
    """Many equal pixels do not hide a wrong class."""
    classes = torch.eye(4)
    found = verdict_on([([VALUES, classes], [VALUES, classes.flip(0)], None)])
    assert found.agreement == 0.0 and found.max_difference == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_equals_nothing(bad: float) -> None:
    values, classes = VALUES.clone(), torch.eye(4)
    values[0] = classes[0, 0] = bad
    assert verdict_on([([values], [values], None)]).agreement == 199 / 200
    found = verdict_on([([classes], [classes], torch.arange(4))])
    assert found.agreement == 0.75 and math.isnan(found.max_difference)
    assert found.onnx_top1 == (75.0 if math.isnan(bad) else 100.0)
    assert verdict_on([([torch.full((4,), bad)], [torch.full((4,), bad)], None)]).agreement == 0.0
    for ours, theirs in ((classes, torch.eye(4)), (torch.eye(4), classes)):  # the largest value is at the same place
        assert verdict_on([([ours], [theirs], None)]).agreement == 0.75


@pytest.mark.parametrize(("outputs", "batches"), [([], 1), ([torch.zeros(0, 10)], 2)])
def test_nothing_to_compare_is_refused(outputs: list[Tensor], batches: int) -> None:
    with refused("verify_onnx: the model's outputs hold no values, so that nothing could be compared"):
        verdict_on([(outputs, outputs, None)] * batches)


def test_a_batch_without_detections_is_skipped() -> None:
    found = verdict_on([([x], [x], None) for x in (torch.zeros(0, 4), torch.eye(4))])
    assert (found.samples, found.agreement) == (4, 1.0)


@pytest.mark.parametrize(("output", "labels"), [
    (torch.randn(4, 1), torch.zeros(4)),  # the arg max of one value is always 0
    (torch.eye(4), torch.eye(4)),  # soft labels
    (torch.randn(4), torch.zeros(4)),
])  # fmt: skip
def test_without_labels_of_classes_there_is_no_accuracy(output: Tensor, labels: Tensor) -> None:
    found = verdict_on([([output], [output], labels)])
    assert found.torch_top1 is None and found.onnx_top1 is None


def test_labels_of_pixels_count() -> None:
    logits = torch.eye(3).reshape(1, 3, 3, 1)
    labels = torch.tensor([0, 1, 0]).reshape(1, 3, 1)
    assert verdict_on([([logits], [logits], labels)]).torch_top1 == pytest.approx(200 / 3)


torch.manual_seed(0)  # whatever was collected before: some weights hide what is wrong

PIXELS = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()]
FEATURES = [*PIXELS, nn.AdaptiveAvgPool2d(1), nn.Flatten()]
ENDS = {
    "classes": [*FEATURES, nn.Linear(8, 10)],
    "image": [*PIXELS, nn.Conv2d(8, 3, 3, padding=1)],
    "embedding": [*FEATURES, nn.Linear(8, 64)],
    "boxes": [*FEATURES, nn.Linear(8, 4), nn.Sigmoid()],
    "regression": [*FEATURES, nn.Linear(8, 1)],
}


def half_the_last_scale(proto: onnx.ModelProto) -> None:
    """The weights of the last layer are half as large as they were, and so is its bias."""
    values = {each.name: each for each in proto.graph.initializer}
    last = [node for node in proto.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")][-1]
    by_output = {name: node for node in proto.graph.node for name in node.output}
    for name in last.input[1:]:
        while name in by_output and by_output[name].op_type != "DequantizeLinear":
            name = by_output[name].input[0]
        found = values[by_output[name].input[1] if name in by_output else name]
        found.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(found) / 2, found.name))


def half_the_output(proto: onnx.ModelProto) -> None:
    name = proto.graph.output[0].name
    for node in proto.graph.node:
        node.output[:] = ["whole" if each == name else each for each in node.output]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    proto.graph.node.append(onnx.helper.make_node("Mul", ["whole", "half"], [name]))


def exported(kind, path, bits=8, target="onnxruntime") -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 3, 8, 8), torch.zeros(16)) for _ in range(2)]
    recipe = qat.QuantRecipe({"bits": bits}, {"bits": bits}, target=target)
    model = qat.prepare(nn.Sequential(*ENDS[kind]), recipe, batches[0][0])
    qat.calibrate(model, batches)
    write = qat.export_litert if target == "litert" else qat.export_onnx
    write(model.eval(), path, batches[0][0])
    return model, batches


@pytest.mark.parametrize("change", [half_the_last_scale, half_the_output])
@pytest.mark.parametrize("kind", ENDS)
def test_answers_half_as_large_are_not_the_models(kind, change, tmp_path):
    path = tmp_path / "model.onnx"
    model, batches = exported(kind, path)
    assert qat.verify_onnx(path, model, batches).is_right and prove(path, model, batches).problem() == ""
    proto = onnx.load(path)
    change(proto)
    onnx.save(proto, path)
    found = qat.verify_onnx(path, model, batches)
    assert found.close < 0.5 and not found.is_right
    assert not explain_differences(path, model, batches).explained
    said = prove(path, model, batches).problem()
    assert said.startswith("only ") and "near-ties of rounding do not explain the others" in said


def test_values_that_near_ties_move_far_are_explained(tmp_path: Path) -> None:
    """At 2 bits one integer of another rounding moves the values by far more than the tolerance."""
    path = tmp_path / "model.onnx"
    model, _ = exported("embedding", path, bits=2)
    quantizer = model.get_submodule("input_quantizer")
    x = quantizer.grid()[0].detach() / 2 * torch.ones(4, 3, 8, 8)  # on a tie everywhere
    with torch.no_grad():
        quantizer.scale.mul_(1 - 1e-6)
    found, behind = qat.verify_onnx(path, model, [x]), explain_differences(path, model, [x])
    assert not found.is_right and behind.explained, behind


@pytest.mark.parametrize("engine", ["xnnpack", "reference"])
def test_a_litert_file_of_another_scale_is_not_explained(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "model.tflite"
    model, batches = exported("embedding", path, target="litert")
    assert qat.verify_litert(path, model, batches, engine=engine).is_right
    assert explain_differences(path, model, batches, engine=engine).unexplained == 0
    with torch.no_grad():
        model.get_submodule("4").weight.mul_(2)
        model.get_submodule("4.weight_quantizer").scale.mul_(2)
    found = qat.verify_litert(path, model, batches, engine=engine)
    behind = explain_differences(path, model, batches, engine=engine)
    assert not found.is_right and not behind.explained


def test_one_value_beyond_the_tolerance_makes_a_prediction_wrong() -> None:
    ours = torch.eye(4) * 3
    theirs = ours + torch.where(torch.arange(4) == 2, 1.01, 0.99)[:, None] * 3 * TOLERANCE
    found = verdict_on([([ours], [theirs], None)])
    assert (found.agreement, found.close) == (1.0, 0.75)


BETWEEN = {"nothing": nn.Identity(), "pool": nn.MaxPool2d(2), "reshape": nn.Flatten(2), "relu": nn.ReLU()}


def twice(between: nn.Module, spec: qat.QuantSpec) -> nn.Module:
    layers = {"conv": qat.QuantConv2d(3, 8, 3, padding=1), "between": between}
    quantizers = {name: create_quantizer(spec, "activation", ()) for name in ("first", "second")}
    return Plain(lambda self, x: self.second(self.between(self.first(self.conv(x)))), **layers, **quantizers)


def rescaled(between: str, symmetric: bool = False) -> tuple[nn.Module, Tensor]:
    """The model in evaluation, calibrated, whose second grid is another one."""
    torch.manual_seed(0)
    x, model = torch.randn(16, 3, 8, 8), twice(BETWEEN[between], qat.QuantSpec(signed=symmetric, symmetric=symmetric))
    qat.calibrate(model, [x])
    with torch.no_grad():
        model.second.scale.mul_(0.83)
    return model.eval(), x


@pytest.mark.parametrize(("between", "symmetric"), [*((name, False) for name in BETWEEN), ("nothing", True)])
def test_both_roundings_are_in_the_file(between: str, symmetric: bool, tmp_path: Path) -> None:
    model, x = rescaled(between, symmetric)
    with torch.no_grad():
        assert not torch.equal(model(x), model.second(model.between(model.conv(x))))  # else the test could not fail
    qat.export_onnx(model, tmp_path / "model.onnx", x)
    assert qat.verify_onnx(tmp_path / "model.onnx", model, [x]).max_difference < 1e-6


@pytest.fixture
def on_ties() -> tuple[nn.Module, Tensor]:
    """A model of two classes, one level of whose input decides, and the scale of that input."""
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        net.bias.zero_()
    model = quantized(nn.Sequential(net), torch.linspace(-1, 1, 20).reshape(10, 2))
    return model, model.get_submodule("input_quantizer").grid()[0].detach()


def explained(model: nn.Module, factor: float, x: Tensor, path: Path) -> Differences:
    """What is found of the file of a copy, whose inputs have a scale so many times as large."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule("input_quantizer").scale.mul_(factor)
    qat.export_onnx(other, path, x)
    return explain_differences(path, model, [x])


def test_a_near_tie_that_falls_the_other_way_is_explained(on_ties, tmp_path):
    model, scale = on_ties
    found = explained(model, 1 - 1e-6, torch.full((4, 2), -0.5) * scale, tmp_path / "m.onnx")
    assert (found.predictions, found.differing, found.unexplained) == (4, 4, 0)
    (layer,) = found.layers
    assert (layer.name, layer.differing, layer.largest, layer.beyond_ties) == ("input_quantizer", 8, 1, 0)


def test_a_scale_of_five_percent_more_is_another_function(on_ties, tmp_path):
    model, scale = on_ties
    found = explained(model, 1.05, torch.tensor([[-0.52, 3.0], [0.6, 2.0]]) * scale, tmp_path / "m.onnx")
    assert (found.differing, found.unexplained) == (1, 2)  # of the other one the class is right, and the values are not
    assert found.layers[0].largest == 1 and found.layers[0].beyond_ties == 1  # by one level, but no tie


@pytest.fixture
def merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, nn.Module, Tensor]:
    """A file whose two quantizers ONNX Runtime merges, unless somebody reads the integers between them."""
    monkeypatch.setattr(exporter_module, "add_barriers", lambda proto: None)
    (model, x), path = rescaled("nothing"), tmp_path / "model.onnx"
    qat.export_onnx(model, path, x)
    return path, model, x


def test_what_the_runtime_merges_unseen_is_another_function(merged):
    """Reading the integers between two quantizers keeps ONNX Runtime from merging them: each layer alone is right."""
    path, model, x = merged
    found = explain_differences(path, model, [x, x])
    assert found.predictions == 2 * 16 * 64 and found.differing > 5
    assert found.unexplained > 0.9 * found.differing
    assert not any(layer.beyond_ties for layer in found.layers if not layer.fused)
    assert {layer.fused for layer in found.layers} == {(), ("first", "second")}
    assert explain_differences(path, model, [x, x], enough=1).predictions == 16 * 64


def test_a_fusion_where_nobody_looks_is_named(merged: tuple[Path, nn.Module, Tensor]) -> None:
    *layers, fusion = compare_layers(*merged)
    assert not any(layer.beyond_ties or layer.fused for layer in layers)
    assert fusion.fused == ("first", "second") and fusion.beyond_ties > 0.1 * fusion.elements
    assert not any(layer.fused for layer in compare_layers(*merged, optimize=False))


def test_equal_predictions_need_no_explanation_and_no_batch_is_refused(on_ties, tmp_path):
    (model, scale), path = on_ties, tmp_path / "model.onnx"
    ties = -scale * torch.arange(20).reshape(10, 2) - scale / 2 * (torch.arange(10) % 2)[:, None]
    assert explained(model, 1.0, ties, path) == Differences(10, 0, 0, [])
    with pytest.raises(ValueError, match="explain_differences: batches is empty"):
        explain_differences(path, model, [])
