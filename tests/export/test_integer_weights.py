"""`integer_weights` and `integer_program` against the ONNX file, the model's own grids, and what evaluation computes.

docs/fpga.md computes a whole program in NumPy.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import qat
from qat.export.litert.file import ReadFile
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain, draw, refused


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Convolutions of several layouts, a layer that is called twice, and a parameter as an operand."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.grouped(torch.relu(self.up_norm(self.up(self.depthwise(x)))))
        y = self.twice(x.mean((2, 3)))
        return self.twice(torch.relu(y)) @ self.table

    net = Plain(
        forward, stem=nn.Conv2d(3, 8, 3, bias=False), norm=nn.BatchNorm2d(8),
        depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8), up=nn.ConvTranspose2d(8, 6, 2), up_norm=nn.BatchNorm2d(6),
        grouped=nn.ConvTranspose2d(6, 9, 2, groups=3), twice=nn.Linear(9, 9), table=nn.Parameter(draw(9, 4)),
    )  # fmt: skip
    return quantized(net, {"x": draw(4, 3, 9, 9)})


def stored(path: Path) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Integers, scale and zero point of the weight, bias and input that each layer of a file reads."""
    graph = onnx.load(path).graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}

    def dequantized(name: str) -> Any:
        node = made_by[name]
        return node if node.op_type == "DequantizeLinear" else dequantized(node.input[0])  # a grouped weight's layout

    found = {}
    for node in graph.node:
        if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
            x, weight, bias = map(dequantized, node.input)
            read = [name for each in (weight, bias, x) for name in each.input if name in values]
            found[weight.name.replace(".weight", "")] = [values[name] for name in read]
    return found


def test_they_are_the_initializers_of_the_file(model: nn.Module, tmp_path: Path) -> None:
    qat.export_onnx(model, tmp_path / "model.onnx", draw(4, 3, 9, 9))
    found, expected = qat.integer_weights(model), stored(tmp_path / "model.onnx")
    assert [*expected] == ["stem", "depthwise", "up", "grouped", "twice", "twice.1"]
    assert [*found] == [*expected, "table_quantizer"]
    for name, parts in expected.items():
        layer, ours = model.get_submodule(name.removesuffix(".1")), found[name]
        assert ours.weight.shape == layer.weight.shape
        weight = layer.channels_first(torch.from_numpy(ours.weight)).numpy() if name == "grouped" else ours.weight
        mine = [weight, ours.scale, ours.zero_point, ours.bias, ours.bias_scale]
        for one, other in zip([*mine, ours.input_scale, ours.input_zero_point], parts, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
    assert (found["stem"].weight.dtype, found["stem"].bias.dtype) == (np.int8, np.int32)


def test_numpy_alone_computes_the_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 5)
    model = quantized(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), x)
    (layer,) = qat.integer_weights(model).values()
    codes = np.clip(np.round(x.numpy() / layer.input_scale) + layer.input_zero_point, 0, 255).astype(np.int64)
    sums = (codes - layer.input_zero_point) @ layer.weight.T.astype(np.int64) + layer.bias
    np.testing.assert_allclose(sums * layer.bias_scale, model(x).detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.bias_scale, layer.input_scale * layer.scale, rtol=1e-6)


def test_a_channel_of_zeros_has_a_product_in_int64() -> None:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    nn.init.zeros_(layers[1].weight[1:2])
    model = quantized(nn.Sequential(*layers), draw(8, 3, 6, 6), qat.QuantRecipe(target="litert"))
    step = qat.integer_program(model)["0_quantizer"]
    assert step.shift.max() == 62 and step.multiplier[1] == 0 and (step.multiplier[[0, 2, 3]] >= 2**30).all()


def test_the_rows_of_an_embedding() -> None:
    model = nn.Sequential(qat.QuantEmbedding(9, 4), qat.QuantLinear(4, 2))
    qat.calibrate(model, [torch.arange(9)])
    found = qat.integer_weights(model)
    assert [*found] == ["0", "1"] and found["0"].bias is None
    rows = (found["0"].weight - found["0"].zero_point[:, None].astype(float)) * found["0"].scale[:, None]
    np.testing.assert_allclose(rows, model[0](torch.arange(9)).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_models_in_parts_have_them_under_their_full_names() -> None:
    def decides(self: Any, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x) if x.abs().sum() > 0 else x[:, :2]

    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = qat.prepare(Plain(decides, body=body, head=nn.Linear(4, 2)), example_inputs=draw(8, 4))
    qat.calibrate(model, [draw(8, 4).abs(), -draw(8, 4).abs(), draw(8, 4)])
    assert [*qat.integer_weights(model)] == ["body.0", "body.2", "head"]


def test_what_has_no_integers_is_a_sentence() -> None:
    with refused("integer_weights: expected a model from qat.prepare, got Linear without quantizers", TypeError):
        qat.integer_weights(nn.Linear(2, 2))
    model = qat.prepare(nn.Sequential(nn.Linear(2, 2)), example_inputs=draw(4, 2))
    with refused("integer_weights: 'input_quantizer' has no range yet; call qat.calibrate(model, batches) first"):
        qat.integer_weights(model)
    coarse = (
        "'0.weight' is torch.float16, in which scales are too coarse to give the integers; call model.float() first"
    )
    with refused(f"integer_weights: {coarse}"):
        qat.integer_weights(model.half())


@pytest.mark.parametrize(("layer", "shapes"), [
    (qat.QuantLinear(5, 3, activation_spec=None), {"": ((3, 5), 3)}),
    (qat.QuantConvTranspose2d(6, 4, 3, activation_spec=None), {"": ((6, 4, 3, 3), 4)}),
    (qat.QuantConvTranspose2d(6, 4, 3, groups=2, activation_spec=None), {"": ((6, 2, 3, 3), 4)}),
    (qat.QuantConv1d(2, 4, 3, weight_spec=qat.QuantSpec(granularity="tensor"), activation_spec=None),
     {"": ((4, 2, 3), 4)}),
    (qat.QuantGRU(4, 6, activation_spec=None), {"product_ih_l0": ((18, 4), 18), "product_hh_l0": ((18, 6), 18)}),
], ids=lambda each: type(each).__name__)  # fmt: skip
def test_a_layer_with_a_float_input_has_its_weights_integers(layer, shapes, tmp_path):
    arrays = qat.integer_weights(layer)
    found = {name: (each.weight.shape, len(each.scale)) for name, each in arrays.items()}
    assert found == shapes and all(each.input_scale is each.bias is each.bias_scale is None for each in arrays.values())
    if isinstance(layer, qat.layers.QuantLayer):
        rows = layer.channels_first(torch.from_numpy(arrays[""].weight).float())
        real = layer.torch_layout(rows * torch.from_numpy(arrays[""].scale).reshape(-1, *[1] * (rows.dim() - 1)))
        torch.testing.assert_close(real, layer.quantized(layer.weight).detach())
    with pytest.raises(ValueError, match="has no grid for its input; prepare the whole model with"):
        qat.export_onnx(layer, tmp_path / "layer.onnx", draw(2, 5))


GRIDS = [
    ({}, "litert", "int8"), ({}, "integer_only", "int8"), ({}, "onnxruntime", "uint8"),
    ({"bits": 4, "signed": True}, "litert", "int8"), ({"bits": 12, "signed": True}, "onnxruntime", "int16"),
    ({"bits": 16}, "onnxruntime", "uint16"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "target", "kind"), GRIDS)
def test_every_grid_is_the_quantizers_own(spec, target, kind):
    """A file may store another one, 128 higher or ending at 127."""
    x = draw(8, 3, 6, 6)
    net = Plain(
        lambda self, x: self.norm(self.conv(x)).relu().mean((2, 3)) @ self.table,
        conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), table=nn.Parameter(draw(4, 5)),
    )  # fmt: skip
    weight = {"bits": spec["bits"]} if spec else {}
    model = quantized(net, {"x": x}, qat.QuantRecipe(weight, spec, target=target))
    found, program = qat.integer_weights(model), qat.integer_program(model)
    quantizers = {name: each for name, each in model.named_modules() if isinstance(each, qat.Quantizer)}
    zero_points = {"conv": "input_quantizer", "table_quantizer": "table_quantizer"}
    for layer, name in zero_points.items():
        arrays, quantizer = found[layer], quantizers[name]
        zero_point = arrays.zero_point if arrays.input_zero_point is None else arrays.input_zero_point
        assert (zero_point, zero_point.dtype) == (int(quantizer.grid()[1]), kind)
    assert found["conv"].weight.dtype == ("int16" if spec.get("bits", 8) > 8 else "int8")
    for name, step in program.items():
        if step.grid is not None:
            scale, zero_point = quantizers[name.partition(".")[0]].grid()
            assert step.grid[:2] == (scale.item(), zero_point.item()) and step.low >= step.grid.qmin
            assert step.grid[2:] == quantizers[name.partition(".")[0]].bounds()
    assert program["conv_quantizer"].low == program["conv_quantizer"].grid.zero_point  # the ReLU's


def test_a_program_has_every_step_and_says_what_is_in_float() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x = nn.functional.relu6(self.conv(x))
        y = nn.functional.gelu(self.same(x))
        x = self.pool(torch.cat([x - y, x.clamp(0, 0.1)], 1)).mean((2, 3))
        return self.gru(x @ self.table)[0], torch.relu(self.head(x)), x + x * 2

    net = Plain(
        forward, conv=nn.Conv2d(3, 4, 3), same=nn.Conv2d(4, 4, 1, groups=2), pool=nn.MaxPool2d(2), head=nn.Linear(8, 2),
        table=nn.Parameter(draw(8, 5)), gru=nn.GRU(5, 3),
    )  # fmt: skip
    model = quantized(net, {"x": draw(4, 3, 10, 10)})
    program = qat.integer_program(model)
    floats = {"gelu": "gelu", "sub_quantizer": "sub", "matmul": "matmul", "gru": "quantgru", "getitem": "getitem"}
    floats |= {"mul": "mul", "add": "add"}
    integers = {
        "input_quantizer": "quantize",
        "conv_quantizer": "conv2d",
        "same_quantizer": "conv2d",
        "conv_quantizer_quantizer": "clip",
        "cat_quantizer": "cat",
        "pool": "maxpool2d",
        "mean_quantizer": "avg_pool",
        "table_quantizer": "constant",
        "relu": "linear",
    }
    assert {name: step.operator for name, step in program.items() if step.in_float} == floats
    assert {name: step.operator for name, step in program.items() if not step.in_float} == integers


@pytest.mark.parametrize("spec", [{"granularity": "tensor"}, {"rule": "power_of_two"}], ids=str)
def test_a_batch_norm_that_takes_a_grids_promise_away_is_named(spec, tmp_path, caplog):
    x = draw(8, 3, 6, 6)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    nn.init.uniform_(layers[1].weight, 0.5, 2.0)
    layers[4].weight.data *= torch.tensor([[1.0], [4.0], [16.0]])
    model = quantized(nn.Sequential(*layers), x, qat.QuantRecipe(spec, target="litert"))
    assert caplog.messages[0] == (
        "prepare: the BatchNorm behind 0 gives each channel a scale of its own when it is folded; where"
        " granularity='tensor' or the rule 'power_of_two' has to hold in the file, fold it first, as by"
        " torch.nn.utils.fuse_conv_bn_eval"
    )
    rows = {line.split()[0]: line for line in qat.summary(model).splitlines() if "Quant" in line}
    assert "per channel" in rows["0"] and "power_of_two " not in rows["0"]
    assert rows["0"].endswith("which gives each channel a scale of its own")
    scales = {name: arrays.scale for name, arrays in qat.integer_weights(model).items()}
    assert len(set(scales["0"])) == 4 and not (np.frexp(scales["0"])[0] == 0.5).any()
    qat.export_litert(model, tmp_path / "model.tflite", x)
    tensors = ReadFile((tmp_path / "model.tflite").read_bytes()).tensors
    (head,) = [each.quantization.scale for each in tensors if each.name == b"4"]
    assert len(head) == (1 if spec.get("granularity") else 3)
    assert ("per tensor" in rows["4"]) == (len(head) == 1)
