"""`lint_onnx` against the runtimes themselves: where it says float the runtime computes in float, and else in integers.

The rules for TensorRT and XNNPACK are their pages' and sources', and are only held to find what they name.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from torch import nn

import qat
from qat.export import lint_onnx, optimized_operators
from qat.export.lint.rules import PROFILES, RULES
from tests.export.test_export_layers import exported

X = "q = QuantizeLinear(x, xs, xz) d = DequantizeLinear(q, xs, xz)"
W = "dw = DequantizeLinear<axis = 0>(w, ws, wz)"
TURNED = f"{W} t = Transpose<perm = [1, 0]>(dw)"
B = "db = DequantizeLinear<axis = 0>(b, bs, bz)"
Y = "qy = QuantizeLinear(c, ys, yz) y = DequantizeLinear(qy, ys, yz)"
Y_X = "qy = QuantizeLinear(c, xs, xz) y = DequantizeLinear(qy, xs, xz)"
CONV = f"{X} {W} c = Conv(d, dw)"
GEMM = f"{X} {W} {B} c = Gemm<transB = 1>(d, dw, db)"
E = "qe = QuantizeLinear(e, ys, yz) de = DequantizeLinear(qe, ys, yz)"
SIGNED = {"xz": np.int8(0), "yz": np.int8(0)}
RELU = {"yz": np.uint8(0)}
UNSIGNED = np.ones((8, 8, 1, 1), np.uint8)
FLOATS = np.linspace(-1, 1, 64, dtype=np.float32)
LINEAR = {"w": np.arange(-32, 32, dtype=np.int8).reshape(8, 8)}
TWICE = {"w": np.tile(LINEAR["w"], 2).reshape(8, 16, 1, 1)}
VARIED = np.linspace(0.01, 0.05, 8, dtype=np.float32)
FOUR_BITS = {name: helper.make_tensor(name, TensorProto.INT4, dims, [int(name != "wz")] * int(np.prod(dims)))
             for name, dims in (("w", [8, 8, 1, 1]), ("w4", [8, 8, 1, 1]), ("wz", [8]))}  # fmt: skip

# name: its operators, what differs in the constants, and the rules of ONNX Runtime that it breaks
GRAPHS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "conv": (f"{CONV} {Y}", {}, set()),
    "conv with int32 bias": (f"{X} {W} {B} c = Conv(d, dw, db) {Y}", {}, set()),
    "conv with float bias": (f"{X} {W} c = Conv(d, dw, f8) {Y}", {}, set()),
    "conv with int8 bias": (f"{X} {W} {B} c = Conv(d, dw, db) {Y}", {n: np.ones(8, np.int8) for n in ("b", "bz")},
                            {"bias-grid"}),
    "conv, signed": (f"{CONV} {Y}", SIGNED, set()),
    "conv with uint8 weight": (f"{CONV} {Y}", {"w": UNSIGNED, "wz": np.ones(8, np.uint8)}, set()),
    "conv with quantizer of its weight": (f"{X} w = QuantizeLinear<axis = 0>(f88, ws, wz) {W} c = Conv(d, dw) {Y}",
                                          {"w": None}, set()),
    "conv with constants in the graph": (f"xs = Constant<value_float = 0.02>() {CONV} {Y}", {"xs": None}, set()),
    "conv without zero points": (f"{CONV} {Y}".replace(", xz", "").replace(", yz", ""), {}, set()),
    "conv to the output": (f"{X} {W} y = Conv(d, dw)", {}, {"result"}),
    "conv read twice": (f"{CONV} qy = QuantizeLinear(c, ys, yz) dy = DequantizeLinear(qy, ys, yz) y = Sub(dy, c)", {},
                        {"result"}),
    "conv to equal quantizers": (f"{X} {W} e = Conv(d, dw) {E} q2 = QuantizeLinear(e, ys, yz) "
                                 "y2 = DequantizeLinear(q2, ys, yz) y = Div(de, y2)", {}, set()),
    "conv, sigmoid": (f"{X} {W} e = Conv(d, dw) c = Sigmoid(e) {Y}", {}, {"result"}),
    "conv, relu": (f"{X} {W} e = Conv(d, dw) c = Relu(e) {Y}", RELU, set()),
    "conv, relu, range below 0": (f"{X} {W} e = Conv(d, dw) c = Relu(e) {Y}", {}, {"clip-kept"}),
    "conv, relu, signed": (f"{X} {W} e = Conv(d, dw) c = Relu(e) {Y}", SIGNED, {"clip-kept"}),
    "conv, relu6, range to 12": (f"{X} {W} e = Conv(d, dw) c = Clip(e, f0, f6) {Y}", RELU, {"clip-kept"}),
    "conv, relu6, range to 5": (f"{X} {W} e = Conv(d, dw) c = Clip(e, f0, f6) {Y}", {**RELU, "ys": np.float32(0.02)},
                                set()),
    "conv, relu, max pool": (f"{X} {W} e = Conv(d, dw) r = Relu(e) c = MaxPool<kernel_shape = [2, 2]>(r) {Y}", RELU,
                             set()),
    "conv, flatten": (f"{X} {W} e = Conv(d, dw) c = Flatten(e) {Y}", {}, {"result"}),
    "max pool, conv": (f"{X} m = MaxPool<kernel_shape = [2, 2]>(d) {W} c = Conv(m, dw) {Y}", {}, set()),
    "relu, conv": (f"{X} m = Relu(d) {W} c = Conv(m, dw) {Y}", {}, {"float-operand"}),
    "conv of floats": (f"{W} c = Conv(x, dw) {Y}", {}, {"float-operand"}),
    "conv of 16 bits": (f"{CONV} {Y}", {"xz": np.uint16(9), "yz": np.uint16(9)}, {"16-bits"}),
    "conv of a 4-bit weight": (f"{CONV} {Y}", {n: FOUR_BITS[n] for n in ("w", "wz")}, {"4-bits"}),
    "transposed conv": (f"{X} {W} c = ConvTranspose(d, dw) {Y}", {}, {"transposed"}),
    "two convs of one int8": (f"{CONV} qy = QuantizeLinear(c, ys, yz) dy = DequantizeLinear(qy, ys, yz) "
                              f"{W.replace('dw', 'v')} e = Conv(d, v) {E} y = Div(dy, de)", SIGNED, {"shared-int8"}),
    "gemm": (f"{GEMM} {Y}", LINEAR, set()),
    "gemm to the output": (GEMM.replace(" c =", " y ="), LINEAR, set()),
    "gemm with float bias": (f"{X} {W} c = Gemm<transB = 1>(d, dw, f8) {Y}", LINEAR, set()),
    "gemm with float bias to the output": (f"{X} {W} y = Gemm<transB = 1>(d, dw, f8)", LINEAR, {"float-bias"}),
    "gemm read twice": (f"{GEMM} qy = QuantizeLinear(c, ys, yz) dy = DequantizeLinear(qy, ys, yz) y = Sub(dy, c)",
                        LINEAR, {"result"}),
    "two gemms of one int8": (f"{X} {W} {W.replace('dw', 'v')} e = Gemm<transB = 1>(d, dw) f = Gemm<transB = 1>(d, v) "
                              "y = Div(e, f)", {**LINEAR, **SIGNED}, set()),
    "matmul": (f"{X} {TURNED} c = MatMul(d, t) {Y}", {**LINEAR, "ws": VARIED}, set()),
    "matmul to the output": (f"{X} {TURNED} y = MatMul(d, t)", LINEAR, set()),
    "matmul, bias": (f"{X} {TURNED} e = MatMul(d, t) c = Add(e, f8) {Y}", LINEAR, set()),
    "matmul, bias, to the output": (f"{X} {TURNED} e = MatMul(d, t) y = Add(e, f8)", LINEAR, {"float-bias"}),
    "matmul of activations": (f"{X} t = Transpose<perm = [0, 1, 3, 2]>(d) c = MatMul(d, t) {Y}", {}, set()),
    "matmul of an activation and floats": (f"{X} s = Sin(x) c = MatMul(d, s) {Y}", {}, {"float-operand"}),
    "add": (f"{X} e = Sin(x) {E} c = Add(d, de) {Y}", {}, set()),
    "add of floats": (f"{X} e = Sin(x) c = Add(d, e) {Y}", {}, {"float-operand"}),
    "add of a constant": (f"{X} c = Add(d, f8) {Y}", {}, {"float-operand"}),
    "add to the output": (f"{X} e = Sin(x) {E} y = Add(d, de)", {}, {"float-result"}),
    "add, relu": (f"{X} e = Sin(x) {E} s = Add(d, de) c = Relu(s) {Y}", RELU | {"xz": np.uint8(0)}, set()),
    "concat of two grids": (f"{X} e = Sin(x) {E} c = Concat<axis = 1>(d, de) {Y}", {}, set()),
    "average pool": (f"{X} c = AveragePool<kernel_shape = [2, 2]>(d) {Y}", {}, set()),
    "max pool": (f"{X} c = MaxPool<kernel_shape = [2, 2]>(d) {Y_X}", {}, set()),
    "max pool to another grid": (f"{X} c = MaxPool<kernel_shape = [2, 2]>(d) {Y}", {}, {"other-grid"}),
    "hardswish": (f"{X} c = HardSigmoid(d) {Y}", {}, {"float-operation"}),
    "silu": (f"{X} s = Sigmoid(d) c = Mul(d, s) {Y}", {}, {"float-operation", "float-result"}),
    "conv of FP8": (f"{CONV} {Y}",
                    {n: helper.make_tensor(n, TensorProto.FLOAT8E4M3FN, [], [0.0]) for n in ("xz", "yz")}, {"float8"}),
    "quantizer before BatchNorm": (f"{X} {W} e = Conv(d, dw) {E} c = BatchNormalization(de, f8, f8, f8, ones) {Y}", {},
                                   {"split-block"}),
}  # fmt: skip

FLOAT_OPERATORS = {"Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "Add", "Concat",
                   "BatchNormalization", "HardSigmoid", "Mul"}  # fmt: skip


def written(text: str, changed: dict[str, Any], path: Path) -> Path:
    """A file of these operators; a constant that is changed to None is left to them."""
    constants: dict[str, Any] = {
        "xs": np.float32(0.02), "xz": np.uint8(128), "ys": np.float32(0.05), "yz": np.uint8(128),
        "w": LINEAR["w"].reshape(8, 8, 1, 1), "ws": np.full(8, 0.01, np.float32), "wz": np.zeros(8, np.int8),
        "b": np.arange(8, dtype=np.int32), "bz": np.zeros(8, np.int32),
        "bs": np.full(8, 0.0002, np.float32), "f8": FLOATS[:8], "ones": np.ones(8, np.float32),
        "f88": FLOATS.reshape(8, 8, 1, 1), "f0": np.float32(0), "f6": np.float32(6),
        **changed,
    }  # fmt: skip
    shape = "4, 8" if "Gemm" in text or "(dw)" in text else "1, 8, 8, 8"
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> graph (float[{shape}] x) => (float y) {{ {text} }}'
    )
    read = {name for node in model.graph.node for name in node.input}
    for name, value in constants.items():
        if value is not None and name in read:
            is_proto = isinstance(value, TensorProto)
            model.graph.initializer.append(value if is_proto else numpy_helper.from_array(np.asarray(value), name))
    onnx.save(model, path)
    return path


def found(path: Path, runtime: str) -> set[str]:
    return {each.rule.name for each in lint_onnx(path, runtime)} - {"saturation"}


@pytest.mark.parametrize("name", GRAPHS)
def test_onnx_runtime_computes_in_float_where_a_rule_says_so(name: str, tmp_path: Path) -> None:
    text, changed, expected = GRAPHS[name]
    path = written(text, changed, tmp_path / "model.onnx")
    assert found(path, "onnxruntime") == expected
    operators = optimized_operators(path, exact=False)
    in_float = FLOAT_OPERATORS & set(operators)
    if "other-grid" in expected:  # MaxPool has one name for floats and integers
        in_float |= {"MaxPool"} if operators["QuantizeLinear"] > 1 else set()
    assert bool(in_float) == bool(expected), operators


REFUSED = {
    "a scale a channel": (f"{CONV} {Y}", {"xs": VARIED, "xz": np.zeros(8, np.uint8)}, "channel-activation"),
    "scales along the inputs": (f"{CONV.replace('axis = 0', 'axis = 1')} {Y}", {"ws": VARIED}, "weight-axis"),
    "gemm's scales along the inputs": (f"{GEMM.replace('axis = 0>(w', 'axis = 1>(w')} {Y}",
                                       {**LINEAR, "ws": VARIED, "bs": VARIED / 50}, "weight-axis"),
    "another scale of the bias": (f"{GEMM} {Y}", {**LINEAR, "bs": np.full(8, 0.05, np.float32)}, "bias-scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_is_a_file_that_onnx_runtime_gets_wrong(name: str, tmp_path: Path) -> None:
    text, changed, expected = REFUSED[name]
    path = written(text, changed, tmp_path / "model.onnx")
    assert {each.rule.name for each in lint_onnx(path, "onnxruntime") if each.severity == "error"} == {expected}
    answers = []
    try:
        for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            x = np.linspace(-2, 2, 512, dtype=np.float32)[: 32 if "Gemm" in text else 512]
            answers.append(session.run(None, {"x": x.reshape(session.get_inputs()[0].shape)})[0])
    except Exception as error:  # ONNX Runtime's own types
        assert "QLinearConv" in str(error)
    else:
        assert np.abs(answers[0] - answers[1]).max() > 2 * 0.05  # levels of the output


TENSORRT: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "as it wants it": (f"{CONV} {Y}", SIGNED, set()),
    "unsigned": (f"{CONV} {Y}", {"xz": np.uint8(0), "yz": np.uint8(0)}, {"unsigned"}),
    "zero points": (f"{CONV} {Y}", {"xz": np.int8(3), "yz": np.int8(3)}, {"zero-point"}),
    "zero points of a weight": (f"{CONV} {Y}", {**SIGNED, "wz": np.ones(8, np.int8)}, {"weight-zero-point"}),
    "int32 bias": (f"{X} {W} {B} c = Conv(d, dw, db) {Y}", SIGNED, {"int32-bias"}),
    "no positive scale": (f"{CONV} {Y}", {**SIGNED, "ys": np.float32(0)}, {"scale"}),
    "computed scale": (f"xs = ReduceMax<keepdims = 0>(x) {CONV} {Y}", {**SIGNED, "xs": None}, {"computed-grid"}),
    "16 bits": (f"{CONV} {Y}", {"xz": np.int16(0), "yz": np.int16(0)}, {"16-bits"}),
    "clip of integers": (f"{CONV.replace('(q, xs', '(q6, xs').replace(' d =', ' q6 = Clip(q, lo, hi) d =')} {Y}",
                         {**SIGNED, "lo": np.int8(-31), "hi": np.int8(31)}, {"integer-operator"}),
    "cast 4 bits": (f"w = Cast<to = 3>(w4) {CONV} {Y}", {**SIGNED, "w": None, "w4": FOUR_BITS["w4"]}, {"cast-4-bits"}),
    "integer operators": ("q = QuantizeLinear(x, xs, xz) i = MatMulInteger(q, w) y = Cast<to = 1>(i)", SIGNED,
                          {"operator-format", "integer-operator"}),
    "two grids in a row": (f"{X} qy = QuantizeLinear(d, ys, yz) y = DequantizeLinear(qy, ys, yz)", SIGNED, {"double"}),
    "sum with the float branch": (f"{X} {W} e = Conv(d, dw) c = Add(e, x) {Y}", SIGNED, {"residual"}),
    "sum with the quantized branch": (f"{X} {W} e = Conv(d, dw) c = Add(e, d) {Y}", SIGNED, set()),
    "sum with both quantized": (f"{X} {W} e = Conv(d, dw) {E} c = Add(de, d) {Y}", SIGNED, {"quantized-sum"}),
}  # fmt: skip


XNNPACK: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "int8 by int8": (f"{CONV} {Y}", SIGNED, set()),
    "uint8 by int8": (f"{CONV} {Y}", {}, {"xnnpack-types"}),
    "uint8 by uint8": (f"{CONV.replace('<axis = 0>', '')} {Y}",
                       {"w": UNSIGNED, "ws": np.float32(0.01), "wz": np.uint8(0)}, set()),
    "uint8 by uint8 per channel": (f"{CONV} {Y}", {"w": UNSIGNED, "wz": np.zeros(8, np.uint8)},
                                   {"xnnpack-types"}),
    "a product": (f"{GEMM} {Y}", {**LINEAR, **SIGNED}, {"xnnpack-types"}),
}  # fmt: skip


@pytest.mark.parametrize(("runtime", "name"), [
    *(("tensorrt", name) for name in TENSORRT), *(("xnnpack", name) for name in XNNPACK)
])  # fmt: skip
def test_what_tensorrt_refuses_and_xnnpack_leaves_is_named(runtime: str, name: str, tmp_path: Path) -> None:
    text, changed, expected = {"tensorrt": TENSORRT, "xnnpack": XNNPACK}[runtime][name]
    ignored = {"float-operand"} if runtime == "tensorrt" else set()
    assert found(written(text, changed, tmp_path / "model.onnx"), runtime) - ignored == expected


OPENVINO: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "conv": (f"{CONV} {Y}", {}, set()),
    "conv, signed": (f"{CONV} {Y}", SIGNED, set()),
    "conv, relu, range below 0": (f"{X} {W} e = Conv(d, dw) c = Relu(e) {Y}", {}, set()),
    "conv to the output": (f"{X} {W} y = Conv(d, dw)", {}, set()),
    "zero points of a weight": (f"{CONV} {Y}", {"wz": np.ones(8, np.int8)}, {"weight-zero-point"}),
    "scales along the inputs": (f"{CONV.replace('axis = 0', 'axis = 1')} {Y}", {"ws": VARIED}, {"weight-axis"}),
    "a scale a channel": (f"{CONV} {Y}", {"xs": VARIED, "xz": np.zeros(8, np.uint8)}, {"channel-activation"}),
    "computed scale": (f"xs = ReduceMax<keepdims = 0>(x) {CONV} {Y}", {"xs": None}, {"computed-grid"}),
    "float weight": (f"{X} c = Conv(d, f88) {Y}", {}, {"rounded-weight"}),
    "16 bits": (f"{CONV} {Y}", {"xz": np.uint16(9), "yz": np.uint16(9)}, {"16-bits"}),
    "4 bits": (f"{CONV} {Y}", {n: FOUR_BITS[n] for n in ("w", "wz")}, {"4-bits"}),
    "cast 4 bits": (f"w = Cast<to = 3>(w4) {CONV} {Y}", {"w": None, "w4": FOUR_BITS["w4"]}, set()),
    "transposed conv": (f"{X} {W} c = ConvTranspose(d, dw) {Y}", {}, {"transposed"}),
    "concat of one grid": (f"{X} k = Concat<axis = 1>(d, d) {W} c = Conv(k, dw) {Y}", TWICE, set()),
    "concat of two grids": (f"{X} e = Sin(x) {E} k = Concat<axis = 1>(d, de) {W} c = Conv(k, dw) {Y}", TWICE,
                            {"concat"}),
    "concat of two grids, quantized": (f"{X} e = Sin(x) {E} k = Concat<axis = 1>(d, de) qk = QuantizeLinear(k, ys, yz) "
                                       f"t = DequantizeLinear(qk, ys, yz) {W} c = Conv(t, dw) {Y}", TWICE, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", OPENVINO)
def test_openvino_computes_in_float_exactly_where_a_rule_says_so(name: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    text, changed, expected = OPENVINO[name]
    path = written(text, changed, tmp_path / "model.onnx")
    assert found(path, "openvino") == expected
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = {}
    for node in compiled.get_runtime_model().get_ordered_ops():
        facts = node.get_rt_info()
        kinds[facts["layerType"].value] = facts["runtimePrecision"].value if "runtimePrecision" in facts else ""
    (kind,) = (kinds[layer] for layer in ("Convolution", "Deconvolution") if layer in kinds)
    assert (kind == "f32") == bool(expected), kinds


def test_a_uint8_weight_without_zero_point_is_not_compiled(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    path = written(f"{CONV} {Y}", {"w": UNSIGNED, "wz": np.zeros(8, np.uint8)}, tmp_path / "model.onnx")
    assert found(path, "openvino") == {"unsigned-weight"}
    with pytest.raises(RuntimeError):
        openvino.Core().compile_model(path, "CPU")


def test_a_product_of_any_number_of_rows_stays_in_integers(tmp_path: Path) -> None:
    """Where all sizes are known, ONNX Runtime makes a Gemm of it and of the float bias, as the graphs above show."""
    path = written(GRAPHS["matmul, bias, to the output"][0], LINEAR, tmp_path / "model.onnx")
    model = onnx.load(path)
    sizes = model.graph.input[0].type.tensor_type.shape.dim
    sizes.insert(0, type(sizes[0])(dim_param="N"))
    onnx.save(model, path)
    assert found(path, "onnxruntime") == set() and optimized_operators(path)["MatMulIntegerToFloat"] == 1


def test_a_model_of_the_rooms_own_is_clean_for_its_target(tmp_path: Path) -> None:
    """But for the grids of `qnnpack`, which ONNX Runtime's XNNPACK provider does not multiply."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU6()]
    net, images = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 5)), torch.randn(2, 3, 8, 8)
    for runtime, target in PROFILES.items():
        path = tmp_path / f"{target}.onnx"
        exported(path, net, images, qat.QuantRecipe(target=target))
        assert found(path, runtime) == ({"xnnpack-types"} if runtime == "xnnpack" else set())


def test_a_file_of_another_tool(tmp_path: Path) -> None:
    """quantize_static as it comes: TensorRT refuses it; with what the remedies say, nothing is left."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Data(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{"x": np.linspace(-2, 3, 512, dtype=np.float32).reshape(1, 8, 8, 8)}])

        def get_next(self) -> Any:
            return next(self.batches, None)

    source = written("[first] y = Conv(x, f88, f8)", {}, tmp_path / "float.onnx")
    assert found(source, "tensorrt") == {"unquantized"}
    for name, options, expected in (
        ("as_it_comes", {}, {"int32-bias", "zero-point"}),
        ("as_it_should", {"weight_type": QuantType.QInt8, "activation_type": QuantType.QInt8, "extra_options": {
            "ActivationSymmetric": True, "QuantizeBias": False}}, set()),
    ):  # fmt: skip
        quantize_static(source, tmp_path / f"{name}.onnx", Data(), **options)
        assert found(tmp_path / f"{name}.onnx", "tensorrt") == expected
    quantize_static(source, tmp_path / "integers.onnx", Data(), quant_format=QuantFormat.QOperator)
    (one,) = lint_onnx(tmp_path / "integers.onnx", "onnxruntime")
    assert (one.rule.name, one.operator) == ("saturation", "first_quant")


def test_every_rule_is_of_a_runtime_and_has_a_source() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        named = f"{rule.error} {rule.warning} {rule.note}".split()
        assert named and set(named) <= PROFILES.keys() and len(named) == len(set(named)) and rule.source, rule.name


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    (tmp_path / "empty.onnx").touch()
    for name, runtime, said in (
        ("text", "tensorrt", r"'.+text\.onnx' is not read as ONNX: "),
        ("empty", "tensorrt", r"'.+empty\.onnx' is not an ONNX file, or one without operators$"),
        ("empty", "a", r"runtime must be one of onnxruntime, .+, xnnpack, got 'a'$"),
    ):
        with pytest.raises(ValueError, match=f"^lint_onnx: {said}"):
            lint_onnx(tmp_path / f"{name}.onnx", runtime)
