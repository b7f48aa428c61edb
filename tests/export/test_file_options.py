"""What a caller chooses about the file: the opset, and the names of its inputs and outputs."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.export import compare_layers, find_saturation, optimized_operators, verify_onnx
from qat.export.onnx import saving
from qat.export.onnx.operators import OPSETS
from tests.export.test_export_layers import quantized


class TwoInTwoOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, image: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        features = self.conv(image).relu().mean((2, 3))
        return self.fc(features) + shift, features


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return quantized(TwoInTwoOut(), INPUTS)


INPUTS = {"image": torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0)), "shift": torch.zeros(4, 2)}


@pytest.mark.parametrize("opset", [OPSETS[0], 20, OPSETS[-1]])
def test_every_opset_is_computed_in_integers(opset: int, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    qat.export_onnx(model, path, INPUTS, opset=opset)
    assert [entry.version for entry in onnx.load(path).opset_import if entry.domain == ""] == [opset]
    assert verify_onnx(path, model, [INPUTS]).agreement == 1
    assert not any(layer.beyond_ties for layer in compare_layers(path, model, INPUTS))
    assert optimized_operators(path)["QLinearConv"] == 1


@pytest.mark.parametrize("opset", [17, 26, "21", 21.0])
def test_other_opsets_are_refused(opset: Any, model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"export_onnx: opset must be 18 to 25, got {opset!r}"):
        qat.export_onnx(model, tmp_path / "x.onnx", INPUTS, opset=opset)


def test_few_bits_have_no_small_container_below_opset_21(tmp_path: Path) -> None:
    x = torch.randn(4, 40)
    prepared = quantized(nn.Sequential(nn.Linear(40, 8)), x, qat.QuantRecipe({"bits": 4}, {"bits": 8}))
    kinds = []
    for opset in (20, 21):
        qat.export_onnx(prepared, tmp_path / "x.onnx", x, opset=opset)
        kinds.append({tensor.data_type for tensor in onnx.load(tmp_path / "x.onnx").graph.initializer})
        assert verify_onnx(tmp_path / "x.onnx", prepared, [x]).agreement == 1
    assert onnx.TensorProto.INT4 not in kinds[0] and onnx.TensorProto.INT4 in kinds[1]


def test_inputs_and_outputs_have_the_names_that_are_given(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    qat.export_onnx(model, path, INPUTS, input_names=["photo", "offset"], output_names=["scores", "embedding"])
    graph = onnx.load(path).graph
    assert [end.name for end in graph.input] == ["photo", "offset"]
    assert [end.name for end in graph.output] == ["scores", "embedding"]
    assert verify_onnx(path, model, [INPUTS]).agreement == 1
    assert len(compare_layers(path, model, INPUTS)) == 3


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (lambda y, z: y, ["output"]),
        (lambda y, z: (y, z), ["output.0", "output.1"]),
        (lambda y, z: {"logits": y, "aux": [z, y]}, ["logits", "aux.0", "aux.1"]),
        (lambda y, z: {"x": y, "none": None}, ["output.x"]),  # an input has that name
    ],
)
def test_outputs_have_the_names_of_the_result(result: Any, names: list[str], tmp_path: Path) -> None:
    """Points 26, 47, 51: they were torch's (`linear_2`, `cat_1`), and the batch axis `s34`."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            return result(self.a(x), self.b(x))

    x = torch.randn(5, 4)
    prepared = quantized(Model(), x)
    qat.export_onnx(prepared, tmp_path / "x.onnx", x)
    graph = onnx.load(tmp_path / "x.onnx").graph
    assert [end.name for end in graph.output] == names
    for end in (*graph.input, *graph.output):
        assert end.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert verify_onnx(tmp_path / "x.onnx", prepared, [x]).close


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"input_names": "image"}, r"input_names: 5 \(i, m, a, g, e\) for 2 inputs"),  # a text is its letters
        ({"input_names": ["a"]}, r"input_names: 1 \(a\) for 2 inputs \(image, shift\)"),
        ({"output_names": ["a", "b", "c"]}, r"output_names: 3 \(a, b, c\) for 2 outputs \("),
        ({"input_names": ["a", "a"]}, "the name 'a' is empty, or given twice; choose another"),
        ({"output_names": ["", "b"]}, "the name '' is empty, or given twice"),
        ({"input_names": ["conv_quantizer", "b"]}, "the name 'conv_quantizer' is taken by another tensor of the file"),
    ],
)
def test_names_that_do_not_fit_are_refused(names: dict[str, Any], said: str, model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"export_onnx: {said}"):
        qat.export_onnx(model, tmp_path / "x.onnx", INPUTS, **names)
    assert not (tmp_path / "x.onnx").exists()


def test_what_one_file_cannot_hold_goes_to_a_second(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 2 GB; here it is what the weights take. A run from another folder, over an older file, by ORT."""
    path, data = tmp_path / "x.onnx", tmp_path / "x.onnx.data"
    qat.export_onnx(model, path, INPUTS)
    expected = optimized_operators(path)
    monkeypatch.setattr(saving, "MOST_BYTES", 100)
    monkeypatch.setattr(saving, "LEAST_BYTES", 100)
    for _ in range(2):  # over a model of one file, then of two
        qat.export_onnx(model, path, INPUTS)
        assert sorted(tmp_path.iterdir()) == [path, data] and data.stat().st_size >= 108
        assert verify_onnx(path, model, [INPUTS]).agreement == 1
        assert not any(layer.differing for layer in compare_layers(path, model, INPUTS))
        assert optimized_operators(path) == expected and len(find_saturation(path)) == 2
