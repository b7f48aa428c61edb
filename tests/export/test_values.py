"""A file whose answers are off by more than near-ties explain is no proof, whatever it predicts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.export import explain_differences
from qat.export.agreement import TOLERANCE, judge
from qat.training.run.proof import prove

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
    """What the file answers is half of what it computes."""
    name = proto.graph.output[0].name
    for node in proto.graph.node:
        node.output[:] = ["whole" if each == name else each for each in node.output]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    proto.graph.node.append(onnx.helper.make_node("Mul", ["whole", "half"], [name]))


def exported(
    kind: str, path: Path, bits: int = 8, target: str = "onnxruntime"
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    batches = [(torch.randn(16, 3, 8, 8), torch.zeros(16)) for _ in range(2)]
    recipe = qat.QuantRecipe({"bits": bits}, {"bits": bits}, target=target)
    model = qat.prepare(nn.Sequential(*ENDS[kind]), recipe, batches[0][0])
    qat.calibrate(model, batches)
    if target == "litert":
        qat.export_litert(model.eval(), path, batches[0][0][:1])
    else:
        qat.export_onnx(model.eval(), path, batches[0][0])
    return model, batches


@pytest.mark.parametrize("change", [half_the_last_scale, half_the_output])
@pytest.mark.parametrize("kind", ENDS)
def test_answers_half_as_large_are_not_the_models(
    kind: str, change: Callable[[onnx.ModelProto], None], tmp_path: Path
) -> None:
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
    found = judge([([ours], [theirs], None)])
    assert (found.agreement, found.close) == (1.0, 0.75)
