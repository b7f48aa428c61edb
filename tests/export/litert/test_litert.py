"""`export_litert`: the integers of the file, in LiteRT and TensorFlow Lite Micro, are those of torch."""

import struct
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.export import compare_litert_layers
from qat.export.litert.exporter import UnwritableWarning

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tflite_micro")
from qat.export.litert.engines import ENGINES, open_engine
from qat.export.litert.file import ReadFile
from tests.references.prepared_case import Plain

FLOAT_ENDS = {"QUANTIZE": 1, "DEQUANTIZE": 1}
EXACT = {"xnnpack"}
"""Engines that multiply sums by a float scale, as torch does; the others round them in fixed point."""


def operators(data: bytes) -> list[str]:
    return [name for name, _ in ReadFile(data).operators()]


class Lambda(nn.Module):
    """A function between layers."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], channels: int = 8) -> None:
        super().__init__()
        self.function = function
        self.first, self.second, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(channels, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(F.relu(self.first(x)), self.second(x)))


def shuffled(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def nets() -> dict[str, tuple[nn.Module, dict[str, int]]]:
    """Small models, and the operators besides the two ends that they must consist of."""
    conv = nn.Conv2d
    flat = [nn.Flatten(), nn.Linear(96, 5)]
    three = {"CONV_2D": 3}
    return {
        "stride 2, margins of torch": (nn.Sequential(conv(4, 6, 4, 2, 1), nn.ReLU()), {"PAD": 1, "CONV_2D": 1}),
        "same margins": (nn.Sequential(conv(4, 6, 3, padding=1), nn.ReLU6()), {"CONV_2D": 1}),
        "dilation": (conv(4, 6, 3, padding=2, dilation=2), {"CONV_2D": 1}),
        "depthwise": (conv(4, 8, 3, padding=1, groups=4), {"DEPTHWISE_CONV_2D": 1}),
        "groups": (conv(4, 8, 3, padding=1, groups=2), {"CONV_2D": 1}),
        "flatten of an image": (
            nn.Sequential(conv(4, 6, 3, 2), nn.MaxPool2d(2, 1), nn.AvgPool2d(1), nn.Flatten(), nn.Linear(54, 5)),
            {"CONV_2D": 1, "MAX_POOL_2D": 1, "AVERAGE_POOL_2D": 1, "RESHAPE": 1, "FULLY_CONNECTED": 1},
        ),
        "max pooling with margins": (nn.Sequential(conv(4, 6, 1), nn.MaxPool2d(4, 2, 1)),
                                     {"CONV_2D": 1, "PADV2": 1, "MAX_POOL_2D": 1}),
        "max pooling, ceiling": (nn.Sequential(conv(4, 6, 1), nn.MaxPool2d(2, 2, ceil_mode=True)),
                                 {"CONV_2D": 1, "MAX_POOL_2D": 1}),
        "average of everything": (nn.Sequential(conv(4, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
                                  {"CONV_2D": 1, "AVERAGE_POOL_2D": 1, "RESHAPE": 1, "FULLY_CONNECTED": 1}),
        "three axes": (nn.Sequential(conv(4, 6, 1), nn.Flatten(2), nn.Linear(81, 5)),
                       {"CONV_2D": 1, "TRANSPOSE": 1, "RESHAPE": 2, "FULLY_CONNECTED": 1}),
        "add": (Lambda(lambda a, b: a + b), {**three, "ADD": 1}),
        "sub": (Lambda(lambda a, b: a - b), {**three, "SUB": 1}),
        "mul": (Lambda(lambda a, b: a * b), {**three, "MUL": 1}),
        "cat": (Lambda(lambda a, b: torch.cat([a, b], 1), 16), {**three, "CONCATENATION": 1}),
        "chunk and shuffle": (Lambda(lambda a, b: shuffled(a).chunk(2, 1)[0] + b[:, :4], 4),
                              {**three, "ADD": 1, "TRANSPOSE": 1, "RESHAPE": 2, "SPLIT": 1, "STRIDED_SLICE": 1}),
        "squeeze and excitation": (Lambda(lambda a, b: a * torch.sigmoid(b.mean((2, 3), keepdim=True))),
                                   {**three, "AVERAGE_POOL_2D": 1, "LOGISTIC": 1, "MUL": 1}),
        "hard ones": (Lambda(lambda a, b: F.hardswish(a) * F.hardsigmoid(b)),
                      {**three, "HARD_SWISH": 1, "DEPTHWISE_CONV_2D": 1, "MUL": 1}),
        "silu, written over its operand": (nn.Sequential(conv(4, 6, 3, padding=1), nn.SiLU(inplace=True)),
                                           {"CONV_2D": 1, "LOGISTIC": 1, "MUL": 1}),
        "tanh": (nn.Sequential(conv(4, 6, 1), nn.Tanh(), conv(6, 6, 1)), {"CONV_2D": 2, "TANH": 1}),
        "softmax": (nn.Sequential(conv(4, 6, 3, 2), *[nn.Flatten(), nn.Linear(96, 5)], nn.Softmax(1)),
                    {"CONV_2D": 1, "RESHAPE": 1, "FULLY_CONNECTED": 1, "SOFTMAX": 1}),
        "nearest": (nn.Sequential(conv(4, 6, 1), nn.Upsample(scale_factor=2.0), conv(6, 6, 1)),
                    {"CONV_2D": 2, "RESIZE_NEAREST_NEIGHBOR": 1}),
        "linear and hardswish": (nn.Sequential(conv(4, 6, 3, 2), *flat, nn.Hardswish(inplace=True), nn.Linear(5, 3)),
                                 {"CONV_2D": 1, "RESHAPE": 1, "FULLY_CONNECTED": 2, "HARD_SWISH": 1}),
    }  # fmt: skip


NETS = nets()


def prepared(net: nn.Module, x: Tensor, **recipe: object) -> nn.Module:
    model = qat.prepare(net, qat.QuantRecipe(**{"target": "litert", **recipe}), x)
    qat.calibrate(model, [x])
    return model.eval()


@pytest.fixture
def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 4, 9, 9)


def trained(net: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(shape)
    return prepared(net, x), x


def check_operators(net: nn.Module, shape: tuple[int, ...], expected: dict[str, int], path: Path, batch: int) -> None:
    model, x = trained(net, shape)
    qat.export_litert(model, path, x, batch=batch)
    assert Counter(operators(path.read_bytes())) == {**FLOAT_ENDS, **expected}
    for engine in ENGINES:
        layers = compare_litert_layers(path, model, x, engine=engine)
        elements, differing = (sum(getattr(layer, key) for layer in layers) for key in ("elements", "differing"))
        assert max(layer.largest for layer in layers) <= 1
        # HARD_SWISH, and ties of averages, differ in every engine; fixed point may round any sum twice.
        assert differing <= 0.01 * elements, (engine, layers)
        assert engine not in EXACT or not sum(layer.beyond_ties for layer in layers), layers


@pytest.mark.parametrize("name", NETS)
def test_operators_and_integers(name: str, tmp_path: Path) -> None:
    net, expected = NETS[name]
    check_operators(net, (4, 4, 9, 9), expected, tmp_path / "model.tflite", batch=1)


def test_a_run_for_another_target_and_its_last_layer_in_float(images: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    )
    model, path = prepared(net, images, target="onnxruntime"), tmp_path / "model.tflite"
    qat.export_litert(model, path, images, batch=2)
    assert operators(path.read_bytes())[-2:] == ["DEQUANTIZE", "FULLY_CONNECTED"]
    for engine in ENGINES:
        found = qat.verify_litert(path, model, [(images, torch.zeros(4, dtype=torch.long))], engine=engine)
        assert found.samples == 4 and found.agreement == 1.0
        assert not sum(layer.beyond_ties for layer in compare_litert_layers(path, model, images, engine=engine))


@pytest.mark.parametrize(("end", "written"), [
    ([nn.Conv2d(6, 5, 3, 2), nn.ReLU()], ["DEQUANTIZE", "CONV_2D"]),
    ([nn.Conv2d(6, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()], ["DEQUANTIZE", "AVERAGE_POOL_2D"]),
])  # fmt: skip
def test_a_result_without_a_grid_is_float(end, written, images, tmp_path):
    model = prepared(nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), *end), images, target="onnxruntime")
    path = tmp_path / "model.tflite"
    qat.export_litert(model, path, images)
    found = operators(path.read_bytes())
    assert found[found.index("DEQUANTIZE") :][:2] == written
    for engine in ENGINES:
        assert qat.verify_litert(path, model, [images], engine=engine).max_difference < 0.01


def test_integer_ends_and_weights_of_four_bits(images: Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 8, 3))
    model, path = prepared(net, images, weight={"bits": 4}), tmp_path / "model.tflite"
    sizes = []
    for four_bits in (False, True):
        qat.export_litert(model, path, images, integer_ends=True, four_bits=four_bits)
        data = path.read_bytes()
        sizes.append(len(data))
        assert set(operators(data)) == {"CONV_2D"}
        codes = model.input_quantizer.codes(images[:1]).to(torch.int8).permute(0, 2, 3, 1).contiguous().numpy()
        (found,) = open_engine(data, "reference")([codes])
        last = model.get_submodule("2_quantizer")
        with torch.no_grad():
            expected = last.codes(model(images[:1])).permute(0, 2, 3, 1)
        assert (torch.from_numpy(found) - expected).abs().max() <= 1
        assert qat.verify_litert(path, model, [images], engine="reference").agreement > 0.99
        layers = compare_litert_layers(path, model, images)
        assert len(layers) == 3 and max(layer.largest for layer in layers) <= 1
    assert sizes[0] - sizes[1] > 0.4 * (64 * 36 + 8 * 576)


@pytest.mark.parametrize("integer_ends", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_stand_in_the_order_of_forward_and_have_its_names(engine, integer_ends, tmp_path):
    """Of two inputs the second is read first, and nothing reads a third one."""

    def forward(self: Any, x: Tensor, unread: Tensor, y: Tensor) -> Tensor:
        other = self.b(y)
        return self.a(x) - 2 * other

    x, unread, y = torch.randn(4, 3, 8, 8), torch.randn(4, 2), torch.randn(4, 3, 8, 8)
    net = Plain(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1))
    model = qat.prepare(net.eval(), qat.QuantRecipe(target="litert"), example_inputs=(x, unread, y))
    qat.calibrate(model, [((x, unread, y),)])
    qat.export_litert(model.eval(), file := tmp_path / "two.tflite", (x, unread, y), integer_ends=integer_ends)
    assert ReadFile(file.read_bytes()).input_names == ["x", "unread", "y"]
    batches = [((x, unread, y),), {"y": y, "x": x, "unread": unread}]
    assert qat.verify_litert(file, model, batches, engine=engine).agreement == 1.0


def test_constants_are_aligned(images: Tensor, tmp_path: Path) -> None:
    """Microcontrollers cannot read int32 from odd addresses."""
    path = tmp_path / "model.tflite"
    model = prepared(nn.Sequential(nn.Conv2d(4, 7, 3), nn.ReLU(), nn.Conv2d(7, 3, 1)), images)
    qat.export_litert(model, path, images)
    data = path.read_bytes()
    from ai_edge_litert import schema_py_generated as schema

    file = schema.Model.GetRootAs(data)
    held = [file.Buffers(i).DataAsNumpy() for i in range(file.BuffersLength()) if file.Buffers(i).DataLength()]
    assert len(held) >= 4 and struct.unpack_from("4s", data, 4) == (b"TFL3",)
    begin = np.frombuffer(data, np.uint8).ctypes.data
    assert all((values.ctypes.data - begin) % 16 == 0 for values in held)


@pytest.mark.parametrize(("net", "target", "sentence"), [
    (nn.Sequential(nn.Conv2d(4, 6, 1), nn.ELU(), nn.Conv2d(6, 6, 1)), "litert", r"'1' \(elu\): LiteRT has no"),
    (nn.Sequential(nn.Conv2d(4, 6, 1), nn.Sigmoid()), "integer_only", r"LOGISTIC has the scale 1/256 and the"),
    (nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReflectionPad2d(1)), "litert", r"'1' \(pad\): padding with reflect is"),
    (nn.Sequential(nn.Conv2d(4, 6, 1), nn.AvgPool2d(2, ceil_mode=True)), "litert", r"'1' \(avg_pool2d\): average"),
])  # fmt: skip
def test_what_cannot_be_written_is_named(net, target, sentence, images, tmp_path) -> None:
    with pytest.warns(UnwritableWarning) if target == "litert" else nullcontext():
        model = prepared(net, images, target=target)
    with pytest.raises(ValueError, match=rf"^export_litert: .*{sentence}") as raised:
        qat.export_litert(model, tmp_path / "model.tflite", images)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_outputs_have_the_names_of_the_result(images: Tensor, tmp_path: Path) -> None:
    """Point 47: `output_0` and `output_1`, whatever the model called them."""
    net = Plain(lambda self, x: {"logits": self.head((maps := F.relu(self.conv(x))).mean((2, 3))), "maps": [maps]},
                conv=nn.Conv2d(4, 8, 3), head=nn.Linear(8, 5))  # fmt: skip
    model, path = prepared(net, images), tmp_path / "model.tflite"
    qat.export_litert(model, path, images)
    file = ReadFile(path.read_bytes())
    assert [file.names[number] for number in file._graph.outputs] == ["logits", "maps.0"]


def test_the_proof_does_not_depend_on_autocast(images: Tensor, tmp_path: Path) -> None:
    """Point 31: torch's side of it would compute in bfloat16, and a right file fail."""
    model, path = prepared(nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU()), images), tmp_path / "model.tflite"
    qat.export_litert(model, path, images)
    found = []
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            found += [(qat.export.verify_litert(path, model, [images]), compare_litert_layers(path, model, images))]
    assert found[0] == found[1] and found[0][0].close
