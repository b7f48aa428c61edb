"""The profile of ONNX Runtime against ONNX Runtime itself: its optimised graph of an operation between two grids."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qat
import qat.export
from qat.targets import PROFILES

PROFILE = PROFILES["onnxruntime"]
EIGHT_ONES = np.ones(8, np.float32)
NO_REGION = np.zeros(0, np.float32)
TWICE = np.array([1, 1, 2, 2], np.float32)

# operation: its chain of ONNX operators, number of quantized inputs, attributes and constants of the first operator
OPERATORS = {
    "add": (["Add"], 2, {}, []),
    "avg_pool": (["AveragePool"], 1, {"kernel_shape": [2, 2]}, []),
    "cat": (["Concat"], 2, {"axis": 1}, []),
    "div": (["Div"], 2, {}, []),
    "elu": (["Elu"], 1, {}, []),
    "gelu": (["Gelu"], 1, {}, []),
    "group_norm": (["GroupNormalization"], 1, {"num_groups": 2}, [EIGHT_ONES[:2], EIGHT_ONES[:2]]),
    "hardsigmoid": (["HardSigmoid"], 1, {}, []),
    "hardswish": (["HardSwish"], 1, {}, []),
    "instance_norm": (["InstanceNormalization"], 1, {}, [EIGHT_ONES, EIGHT_ONES]),
    "interpolate": (["Resize"], 1, {"mode": "linear"}, [NO_REGION, TWICE]),
    "layer_norm": (["LayerNormalization"], 1, {}, [EIGHT_ONES, EIGHT_ONES]),
    "leaky_relu": (["LeakyRelu"], 1, {}, []),
    "log_softmax": (["LogSoftmax"], 1, {}, []),
    "matmul": (["MatMul"], 2, {}, []),
    "maximum": (["Max"], 2, {}, []),
    "mean": (["ReduceMean"], 1, {"keepdims": 0}, [np.array([2, 3])]),
    "minimum": (["Min"], 2, {}, []),
    "mish": (["Mish"], 1, {}, []),
    "mul": (["Mul"], 2, {}, []),
    "prelu": (["PRelu"], 1, {}, [EIGHT_ONES.reshape(8, 1, 1) / 8]),
    "sigmoid": (["Sigmoid"], 1, {}, []),
    "silu": (["Sigmoid", "Mul"], 1, {}, []),
    "softmax": (["Softmax"], 1, {}, []),
    "sub": (["Sub"], 2, {}, []),
    "tanh": (["Tanh"], 1, {}, []),
}


def optimised(operators, inputs, attributes, constants, path: Path, scales=(0.02, 0.03, 0.05)) -> Counter[str]:
    """The operators of ONNX Runtime's graph for Q/DQ -> operators -> Q/DQ, with these scales of inputs and output."""
    values = {"zero": np.array(128, np.uint8), "out_scale": np.array(scales[-1], np.float32)}
    nodes, read = [], []
    for number, scale in zip(range(inputs), scales, strict=False):
        values[f"scale{number}"] = np.array(scale, np.float32)
        grid = [f"scale{number}", "zero"]
        nodes.append(helper.make_node("QuantizeLinear", [f"x{number}", *grid], [f"q{number}"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"q{number}", *grid], [f"d{number}"]))
        read.append(f"d{number}")
    for number, constant in enumerate(constants):
        values[f"constant{number}"] = constant
    for number, operator in enumerate(operators):
        given = [*read, *(f"constant{place}" for place in range(len(constants)))] if number == 0 else [*read, "y0"]
        nodes.append(helper.make_node(operator, given, [f"y{number}"], **(attributes if number == 0 else {})))
    nodes.append(helper.make_node("QuantizeLinear", [f"y{len(operators) - 1}", "out_scale", "zero"], ["q"]))
    nodes.append(helper.make_node("DequantizeLinear", ["q", "out_scale", "zero"], ["out"]))
    graph = helper.make_graph(
        nodes,
        "operation",
        [helper.make_tensor_value_info(f"x{number}", TensorProto.FLOAT, (1, 8, 8, 8)) for number in range(inputs)],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("operation", OPERATORS)
def test_an_operation_computes_in_float_exactly_where_the_profile_says_so(operation: str, tmp_path: Path) -> None:
    operators, inputs, *rest = OPERATORS[operation]
    found = optimised(operators, inputs, *rest, tmp_path / "model.onnx")
    in_integers = any(name.startswith("QLinear") for name in found)
    assert in_integers == (found["QuantizeLinear"] == inputs and found["DequantizeLinear"] == 1)
    assert in_integers != (operation in PROFILE.float_operations), found


@pytest.mark.parametrize(("bits", "operators"), [(8, {"QLinearSigmoid", "QLinearMul"}), (4, {"Sigmoid", "Mul"})])
def test_silu_is_split_at_8_bits(bits: int, operators: set[str], tmp_path: Path) -> None:
    x = torch.randn(2, 3, 6, 6)
    float_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 1)).eval()
    model = qat.prepare(float_model, qat.QuantRecipe(activation={"bits": bits}), x)
    qat.calibrate(model, [x])
    qat.export_onnx(model, tmp_path / "model.onnx", x)
    assert operators <= set(qat.export.optimized_operators(tmp_path / "model.onnx"))


def test_every_float_operation_was_asked() -> None:
    assert set(OPERATORS) >= PROFILE.float_operations


@pytest.mark.parametrize(("out_scale", "in_integers"), [(0.02, True), (0.05, False)])
def test_max_pooling_computes_in_integers_on_one_grid_only(out_scale: float, in_integers: bool, tmp_path: Path) -> None:
    assert "max_pool" in PROFILE.shared_grids
    found = optimised(["MaxPool"], 1, {"kernel_shape": [2, 2]}, [], tmp_path / "model.onnx", (0.02, out_scale))
    assert (found["QuantizeLinear"] == found["DequantizeLinear"] == 1) == in_integers
