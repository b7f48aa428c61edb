"""Weights of few bits in containers of 4 and 2 bits: the same integers, as fast, in a smaller file."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qat
from qat.export import find_saturation, optimized_operators, verify_onnx
from qat.export.onnx.graph import stored_arrays
from qat.export.onnx.saving import pack_weights
from qat.export.onnxruntime.session import EXACT_OPTION
from tests.export.test_export_layers import quantized


def graph_of(values: np.ndarray, opset: int = 21) -> Any:
    weight = numpy_helper.from_array(values, "w")
    scale = numpy_helper.from_array(np.float32(0.5), "scale")
    nodes = [helper.make_node("DequantizeLinear", ["w", "scale"], ["y"], name="layer.weight")]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, values.shape)
    graph = helper.make_graph(nodes, "g", [], [output], [weight, scale])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "opset", "container"),
    [
        (np.int8, -8, 7, 25, "INT4"), (np.uint8, 0, 15, 21, "UINT4"), (np.int8, 0, 8, 21, "UINT4"),
        (np.int8, -9, 7, 25, None), (np.uint8, 0, 16, 25, None), (np.int8, -2, 1, 21, "INT4"),
        (np.int8, -2, 1, 25, "INT2"), (np.uint8, 0, 3, 25, "UINT2"), (np.int8, -1, 2, 25, "INT4"),
    ],
)  # fmt: skip
def test_integers_survive_their_container(dtype: Any, low: int, high: int, opset: int, container: str | None) -> None:
    """An odd number of them, with both ends of their range, in numpy, in onnx and in its reference evaluator."""
    numbers = np.random.default_rng(0)
    values = numbers.integers(low, high + 1, (5, 3, 7)).astype(dtype)
    values.flat[:2] = low, high
    proto = graph_of(values, opset)
    pack_weights(proto, opset)
    onnx.checker.check_model(proto)
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    assert "w" in kinds if container is None else kinds["w.packed"] == TensorProto.DataType.Value(container)
    found = stored_arrays(proto.graph)["w"]
    assert found.dtype == dtype and np.array_equal(found, values)
    (computed,) = onnx.reference.ReferenceEvaluator(proto).run(None, {})
    assert np.array_equal(computed, values.astype(np.float32) * 0.5)


def test_few_elements_stay_as_they_are() -> None:
    proto = graph_of(np.zeros((7, 9), np.int8))
    pack_weights(proto, 25)
    assert [tensor.name for tensor in proto.graph.initializer] == ["w", "scale"]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 24, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)).eval()


def exported(
    path: Path, weight: dict[str, Any], activation: dict[str, Any], **options: Any
) -> tuple[Any, torch.Tensor]:
    images = torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    model = quantized(small_model(), images, qat.QuantRecipe(weight, activation))
    qat.export_onnx(model, path, images, **options)
    return model, images


@pytest.mark.parametrize(("bits", "opset"), [(2, 21), (2, 25), (4, 21)])
def test_the_runtime_computes_the_same_in_the_same_kernels(bits: int, opset: int, tmp_path: Path) -> None:
    import onnxruntime as ort

    answers, operators, saturation = [], [], []
    for packed in (True, False):
        path = tmp_path / f"{packed}.onnx"
        exported(path, {"bits": bits}, {"bits": 8}, packed=packed, opset=opset)
        small = f"INT{2 if opset == 25 else 4}"
        kinds = {tensor.data_type for tensor in onnx.load(path).graph.initializer}
        assert (TensorProto.DataType.Value(small) in kinds) == packed
        for exact in (False, True):
            options = ort.SessionOptions()
            if exact:  # converts the weights to uint8, by the names of their initializers
                options.add_session_config_entry(*EXACT_OPTION)
            session = ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
            answers.append(session.run(None, {session.get_inputs()[0].name: np.ones((2, 3, 12, 12), np.float32)})[0])
        operators.append(optimized_operators(path))
        saturation.append(find_saturation(path))
    assert operators[0] == operators[1] and operators[0]["QLinearConv"] == 3 and "Cast" not in operators[0]
    assert np.array_equal(answers[0], answers[2]) and np.array_equal(answers[1], answers[3])
    assert saturation[0] == saturation[1] and len(saturation[0]) == 4


def test_a_table_of_few_bits_is_packed_too(tmp_path: Path) -> None:
    model = qat.QuantEmbedding(50, 8, weight_spec=qat.QuantSpec(bits=4))
    indices = torch.arange(12).reshape(3, 4)
    qat.calibrate(model, [indices])
    sizes = []
    for packed in (True, False):
        qat.export_onnx(model.eval(), tmp_path / f"{packed}.onnx", indices, packed=packed)
        assert verify_onnx(tmp_path / f"{packed}.onnx", model, [indices]).max_difference == 0
        sizes.append((tmp_path / f"{packed}.onnx").stat().st_size)
    assert sizes[1] - sizes[0] > 100
