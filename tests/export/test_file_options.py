"""What a caller chooses about the file: opset, names, a second file, uint8 pixels as input, containers of few bits."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import qat
from qat.export import compare_layers, find_saturation, lint_onnx, optimized_operators, verify_onnx
from qat.export.onnx import formats
from qat.export.onnx.formats import pack_weights, take_pixels
from qat.export.onnx.graph import stored_arrays
from qat.export.onnx.operators import OPSETS
from qat.export.onnxruntime.session import EXACT_OPTION, default_is_exact
from qat.training.data.transforms import ToInput
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain, draw


@pytest.fixture(scope="module")
def model() -> Any:
    def forward(self: Any, image: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(image).relu().mean((2, 3))
        return self.fc(features) + shift, features

    return quantized(Plain(forward, conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(4, 2)), INPUTS)


INPUTS = {"image": draw(4, 3, 6, 6), "shift": torch.zeros(4, 2)}


@pytest.mark.parametrize("opset", [OPSETS[0], 17, 20, OPSETS[-1]])
def test_every_opset_is_computed_in_integers(opset: int, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    qat.export_onnx(model, path, INPUTS, opset=opset)
    assert [entry.version for entry in onnx.load(path).opset_import if entry.domain == ""] == [opset]
    assert verify_onnx(path, model, [INPUTS]).agreement == 1
    assert not any(layer.beyond_ties for layer in compare_layers(path, model, INPUTS))
    assert optimized_operators(path)["QLinearConv"] == 1


def test_inputs_and_outputs_have_the_names_that_are_given(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    qat.export_onnx(model, path, INPUTS, input_names=["photo", "offset"], output_names=["scores", "embedding"])
    graph = onnx.load(path).graph
    assert [end.name for end in graph.input] == ["photo", "offset"]
    assert [end.name for end in graph.output] == ["scores", "embedding"]
    assert verify_onnx(path, model, [INPUTS]).agreement == 1
    assert len(compare_layers(path, model, INPUTS)) == 3


@pytest.mark.parametrize(("result", "names"), [
    (lambda y, z: y, ["output"]),
    (lambda y, z: (y, z), ["output.0", "output.1"]),
    (lambda y, z: {"logits": y, "aux": [z, y]}, ["logits", "aux.0", "aux.1"]),
    (lambda y, z: {"x": y, "none": None}, ["output.x"]),  # an input has that name
])  # fmt: skip
def test_outputs_have_the_names_of_the_result(result: Any, names: list[str], tmp_path: Path) -> None:
    """Points 26, 47, 51: they were torch's (`linear_2`, `cat_1`), and the batch axis `s34`."""
    x = torch.randn(5, 4)
    prepared = quantized(Plain(lambda self, x: result(self.a(x), self.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 2)), x)
    qat.export_onnx(prepared, tmp_path / "x.onnx", x)
    graph = onnx.load(tmp_path / "x.onnx").graph
    assert [end.name for end in graph.output] == names
    for end in (*graph.input, *graph.output):
        assert end.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert verify_onnx(tmp_path / "x.onnx", prepared, [x]).close


@pytest.mark.parametrize(("options", "said"), [
    *(({"opset": opset}, f"opset must be 13 to 25, got {opset!r}") for opset in (12, 26, "21", 21.0)),
    ({"input_names": "image"}, r"input_names: 5 \(i, m, a, g, e\) for 2 inputs"),  # a text is its letters
    ({"input_names": ["a"]}, r"input_names: 1 \(a\) for 2 inputs \(image, shift\)"),
    ({"output_names": ["a", "b", "c"]}, r"output_names: 3 \(a, b, c\) for 2 outputs \("),
    ({"input_names": ["a", "a"]}, "the name 'a' is empty, or given twice; choose another"),
    ({"output_names": ["", "b"]}, "the name '' is empty, or given twice"),
    ({"input_names": ["conv_quantizer", "b"]}, "the name 'conv_quantizer' is taken by another tensor of the file"),
])  # fmt: skip
def test_opsets_and_names_that_do_not_fit_are_refused(options, said, model, tmp_path):
    with pytest.raises(ValueError, match=f"export_onnx: {said}"):
        qat.export_onnx(model, tmp_path / "x.onnx", INPUTS, **options)
    assert not (tmp_path / "x.onnx").exists()


def test_what_one_file_cannot_hold_goes_to_a_second(model, tmp_path, monkeypatch):
    """The limit is 2 GB; here it is what the weights take. A run from another folder, over an older file, by ORT."""
    path, data = tmp_path / "x.onnx", tmp_path / "x.onnx.data"
    qat.export_onnx(model, path, INPUTS)
    expected = optimized_operators(path)
    monkeypatch.setattr(formats, "MOST_BYTES", 100)
    monkeypatch.setattr(formats, "LEAST_BYTES", 100)
    for _ in range(2):  # over a model of one file, then of two
        qat.export_onnx(model, path, INPUTS)
        assert sorted(tmp_path.iterdir()) == [path, data] and data.stat().st_size >= 108
        assert verify_onnx(path, model, [INPUTS]).agreement == 1
        assert not any(layer.differing for layer in compare_layers(path, model, INPUTS))
        assert optimized_operators(path) == expected and len(find_saturation(path)) == 2


IMAGES = draw(2, 3, 8, 8)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def model_for(images: torch.Tensor, channels: int = 3) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return quantized(layers, images)


def run(path: Path, images: np.ndarray, options: ort.SessionOptions | None = None) -> np.ndarray:
    session = ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: images})
    return np.asarray(scores)


NAMES = ("pixels", "pixels_float", "pixels_centred", "pixels_scaled", "normalized", "pixel_mean", "pixel_std")


def with_tensors_of_the_same_names(images: Tensor) -> Any:
    """It keeps pixel_mean and pixel_std itself, as SAM and Detectron2 do."""
    buffers = {name: nn.Buffer(torch.rand(3, 1, 1) + 0.5) for name in NAMES}
    net = Plain(lambda self, x: self.conv(functools.reduce(lambda x, name: x * getattr(self, name), NAMES, x)),
                conv=nn.Conv2d(3, 4, 3), **buffers)  # fmt: skip
    return quantized(net, images)


@pytest.mark.parametrize("model", [model_for, with_tensors_of_the_same_names])
def test_every_pixel_value_gives_the_same_answer_to_the_bit(model: Any, tmp_path: Path) -> None:
    """All 256 values of every channel, and two lengths of the batch."""
    numbers = np.random.default_rng(0)
    pixels = np.stack([numbers.permutation(256) for _ in range(9)]).reshape(3, 16, 16, 3).astype(np.uint8)
    normalized = ToInput(MEAN, STD)(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
    prepared = model(normalized)
    qat.export_onnx(prepared, tmp_path / "plain.onnx", normalized)
    qat.export_onnx(prepared, tmp_path / "pixels.onnx", normalized, normalization=(MEAN, STD))
    for count in (3, 1):
        expected = run(tmp_path / "plain.onnx", normalized[:count].numpy())
        assert np.array_equal(run(tmp_path / "pixels.onnx", pixels[:count]), expected)
    plain, taking = (optimized_operators(tmp_path / f"{name}.onnx") for name in ("plain", "pixels"))
    assert taking["QLinearConv"] == plain["QLinearConv"] >= (model is model_for)


def test_the_input_is_called_pixels_or_as_asked(tmp_path: Path) -> None:
    model = model_for(IMAGES)
    for names, expected in ((None, "pixels"), (["photo"], "photo")):
        qat.export_onnx(model, tmp_path / "x.onnx", IMAGES, normalization=(MEAN, STD), input_names=names)
        declared = ort.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"]).get_inputs()[0]
        assert (declared.name, declared.type, declared.shape[1:]) == (expected, "tensor(uint8)", [8, 8, 3])


def test_the_constants_are_rounded_as_train_py_rounds_them(tmp_path: Path) -> None:
    """255 times a float32, not a float32 of 255 times a float64: for some numbers that is another one."""
    mean, std = (0.1307, 0.4377, 0.5071), (0.3081, 0.2675, 0.2761)
    assert any(np.float32(255 * value) != np.float32(255) * np.float32(value) for value in mean + std)
    qat.export_onnx(model_for(IMAGES), tmp_path / "x.onnx", IMAGES, normalization=(mean, std))
    stored = stored_arrays(onnx.load(tmp_path / "x.onnx").graph)
    for name, values in (("pixel_mean", mean), ("pixel_std", std)):
        assert stored[name].dtype == np.float32
        assert np.array_equal(stored[name], torch.tensor(values).mul(255).numpy())


@pytest.mark.parametrize("normalization", [
    ((0.5,), (0.5,)), (MEAN, (0.1, -0.1, 0.1)), ((float("nan"), 0, 0), STD), (MEAN, (1e-50, 1, 1)),
    (MEAN, (1e39, 1, 1)), (0.5, 0.5), ((0, 0, 0),), (MEAN, STD, STD), ("abc", "def"), 5, (MEAN, None),
], ids=str)  # fmt: skip
def test_what_is_no_mean_and_std_is_refused(normalization: Any) -> None:
    with pytest.raises(ValueError, match=r"must be \(mean, std\), each of 3 finite numbers, std above 0; got"):
        take_pixels(onnx.ModelProto(), normalization)


def test_a_file_of_other_channels_is_refused(tmp_path: Path) -> None:
    model = model_for(IMAGES[:, :1], 1)
    with pytest.raises(ValueError, match=r"normalization is for one input of images \(N, 3, H, W\), the file has inp"):
        qat.export_onnx(model, tmp_path / "x.onnx", IMAGES[:, :1], normalization=(MEAN, STD))


def graph_of(values: np.ndarray, opset: int = 21) -> Any:
    weight = numpy_helper.from_array(values, "w")
    scale = numpy_helper.from_array(np.float32(0.5), "scale")
    nodes = [helper.make_node("DequantizeLinear", ["w", "scale"], ["y"], name="layer.weight")]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, values.shape)
    graph = helper.make_graph(nodes, "g", [], [output], [weight, scale])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@pytest.mark.parametrize(("dtype", "low", "high", "opset", "container"), [
    (np.int8, -8, 7, 25, "INT4"), (np.uint8, 0, 15, 21, "UINT4"), (np.int8, 0, 8, 21, "UINT4"),
    (np.int8, -9, 7, 25, None), (np.uint8, 0, 16, 25, None), (np.int8, -2, 1, 21, "INT4"),
    (np.int8, -2, 1, 25, "INT2"), (np.uint8, 0, 3, 25, "UINT2"), (np.int8, -1, 2, 25, "INT4"),
])  # fmt: skip
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
    (computed,) = ReferenceEvaluator(proto).run(None, {})
    assert np.array_equal(computed, values.astype(np.float32) * 0.5)


def test_few_elements_stay_as_they_are() -> None:
    proto = graph_of(np.zeros((7, 9), np.int8))
    pack_weights(proto, 25)
    assert [tensor.name for tensor in proto.graph.initializer] == ["w", "scale"]


CONTAINERS = [(2, 21, "INT4"), (2, 25, "INT2"), (4, 21, "INT4"), (4, 20, None)]  # below opset 21 there is none


@pytest.mark.parametrize(("bits", "opset", "container"), CONTAINERS)
def test_the_runtime_computes_the_same_in_the_same_kernels(bits, opset, container, tmp_path):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 24, 1)]
    net, images = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)), draw(16, 3, 12, 12)
    model = quantized(net, images, qat.QuantRecipe({"bits": bits}, {"bits": 8}))
    answers, operators, saturation = [], [], []
    for packed in (True, False):
        path = tmp_path / f"{packed}.onnx"
        qat.export_onnx(model, path, images, packed=packed, opset=opset)
        kinds = {TensorProto.DataType.Name(tensor.data_type) for tensor in onnx.load(path).graph.initializer}
        assert kinds & {"INT4", "INT2"} == ({container} if packed and container else set())
        assert verify_onnx(path, model, [images]).agreement == 1
        for exact in (False, True):
            options = ort.SessionOptions()
            if exact:  # converts the weights to uint8, by the names of their initializers
                options.add_session_config_entry(*EXACT_OPTION)
            answers.append(run(path, np.ones((2, 3, 12, 12), np.float32), options))
        operators.append(optimized_operators(path))
        saturation.append(find_saturation(path))
    assert operators[0] == operators[1] and operators[0]["QLinearConv"] == 3 and "Cast" not in operators[0]
    assert np.array_equal(answers[0], answers[2]) and np.array_equal(answers[1], answers[3])
    assert saturation[0] == saturation[1] and len(saturation[0]) == 4


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_that_is_called_on_many_maps_is_stored_once(bits: int, tmp_path: Path) -> None:
    """Also where a session gives each weight a new name (`EXACT_OPTION`); the tools look through what shares it."""
    torch.manual_seed(0)
    maps = [draw(2, 16, size, size) for size in (8, 6, 4)]
    net = Plain(lambda self, a, b, c: [self.b(F.relu(self.a(x)).flatten(2).mT) for x in (a, b, c)],
                a=nn.Conv2d(16, 64, 3), b=nn.Linear(64, 64))  # fmt: skip
    inputs, path = dict(zip("abc", maps, strict=True)), tmp_path / "model.onnx"
    model = quantized(net, inputs, qat.QuantRecipe({"bits": bits}, {"bits": 8}))
    qat.export_onnx(model, path, inputs)
    stored = [tensor for tensor in onnx.load(path).graph.initializer if len(tensor.dims) > 1]
    assert sorted(tuple(tensor.dims) for tensor in stored) == [(64, 16, 3, 3), (64, 64)]
    answers = []
    for exact in (not default_is_exact(), True):
        options = ort.SessionOptions()
        if exact:
            options.add_session_config_entry(*EXACT_OPTION)
        answers += ort.InferenceSession(str(path), options).run(None, {key: x.numpy() for key, x in inputs.items()})
    assert all(np.array_equal(a, b) for a, b in zip(answers[:3], answers[3:], strict=True))
    assert verify_onnx(path, model, [inputs]).max_difference < 2e-6
    found = compare_layers(path, model, inputs)
    assert len(found) == 6 and not any(layer.beyond_ties for layer in found)
    assert optimized_operators(path)["QLinearConv"] == 3 and not optimized_operators(path)["Slice"]
    assert len(find_saturation(path)) == 2
    assert {found.rule.name for found in lint_onnx(path, "onnxruntime")} <= {"saturation"}


def test_a_table_of_few_bits_is_packed_too(tmp_path: Path) -> None:
    model = qat.QuantEmbedding(50, 8, weight_spec=qat.QuantSpec(bits=4))
    indices = torch.arange(12).reshape(3, 4)
    qat.calibrate(model, [indices])
    sizes = []
    for packed in (True, False):
        path = tmp_path / f"{packed}.onnx"
        qat.export_onnx(model.eval(), path, indices, packed=packed)
        assert verify_onnx(path, model, [indices]).max_difference == 0
        sizes.append(path.stat().st_size)
    assert sizes[1] - sizes[0] > 100
