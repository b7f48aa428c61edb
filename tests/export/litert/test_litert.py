"""`export_litert`: the integers of the file, in LiteRT and TensorFlow Lite Micro, are those of torch."""

import struct
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


def joined(function: Callable[[Tensor, Tensor], Tensor], channels: int = 8) -> nn.Module:
    """A function of the results of two layers, and a layer behind it."""
    layers = {"first": nn.Conv2d(4, 8, 1), "second": nn.Conv2d(4, 8, 1), "last": nn.Conv2d(channels, 6, 1)}
    return Plain(lambda self, x: self.last(function(F.relu(self.first(x)), self.second(x))), **layers)


def prepared(net: nn.Module, x: Any, **recipe: object) -> nn.Module:
    model = qat.prepare(net, qat.QuantRecipe(**{"target": "litert", **recipe}), x)
    qat.calibrate(model, [x])
    return model.eval()


@pytest.fixture
def images() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 4, 9, 9)


def trained(net: nn.Module, shape: tuple[int, ...], **recipe: object) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(shape)
    return prepared(net, x, **recipe), x


def check(model: nn.Module, x: Tensor, path: Path, batch: int = 1, share: float = 1.0) -> None:
    """Every integer in every engine, near-ties aside: within a level where sums are rounded twice, in fixed point."""
    qat.export_litert(model, path, x, batch=batch)
    for engine in ENGINES:
        layers = compare_litert_layers(path, model, x, engine=engine)
        assert layers and max(each.largest for each in layers) <= 1, (engine, layers)
        assert engine not in EXACT or not any(each.beyond_ties for each in layers), (engine, layers)
        assert sum(each.differing for each in layers) <= share * sum(each.elements for each in layers), (engine, layers)


@pytest.mark.parametrize(("end", "written"), [
    ([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)], ["DEQUANTIZE", "FULLY_CONNECTED"]),
    ([nn.Conv2d(6, 5, 3, 2), nn.ReLU()], ["DEQUANTIZE", "CONV_2D"]),
    ([nn.Conv2d(6, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()], ["DEQUANTIZE", "AVERAGE_POOL_2D"]),
])  # fmt: skip
def test_a_run_for_another_target_has_its_last_layer_in_float(end, written, images, tmp_path):
    model = prepared(nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), *end), images, target="onnxruntime")
    path = tmp_path / "model.tflite"
    check(model, images, path, batch=2)
    named = operators(path.read_bytes())
    assert named[named.index("DEQUANTIZE") :][:2] == written
    for engine in ENGINES:
        found = qat.verify_litert(path, model, [(images, torch.zeros(4, dtype=torch.long))], engine=engine)
        assert found.samples == 4 and found.close == 1.0 and found.max_difference < 0.01


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

    inputs = {"x": torch.randn(4, 3, 8, 8), "unread": torch.randn(4, 2), "y": torch.randn(4, 3, 8, 8)}
    model = prepared(Plain(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1)), inputs)
    qat.export_litert(model, file := tmp_path / "two.tflite", tuple(inputs.values()), integer_ends=integer_ends)
    assert ReadFile(file.read_bytes()).input_names == [*inputs]
    batches = [(tuple(inputs.values()),), dict(reversed(inputs.items()))]
    assert qat.verify_litert(file, model, batches, engine=engine).agreement == 1.0


def test_constants_are_aligned(images: Tensor, tmp_path: Path) -> None:
    """Microcontrollers cannot read int32 from odd addresses."""
    from ai_edge_litert import schema_py_generated as schema

    model = prepared(nn.Sequential(nn.Conv2d(4, 7, 3), nn.ReLU(), nn.Conv2d(7, 3, 1)), images)
    qat.export_litert(model, path := tmp_path / "model.tflite", images)
    data = path.read_bytes()
    file = schema.Model.GetRootAs(data)
    held = [file.Buffers(i).DataAsNumpy() for i in range(file.BuffersLength()) if file.Buffers(i).DataLength()]
    assert len(held) >= 4 and struct.unpack_from("4s", data, 4) == (b"TFL3",)
    begin = np.frombuffer(data, np.uint8).ctypes.data
    assert all((values.ctypes.data - begin) % 16 == 0 for values in held)


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
