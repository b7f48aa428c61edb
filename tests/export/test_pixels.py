"""Files that take uint8 pixels: the same integers, to the bit, as from images that were normalised outside."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import qat
from qat.export import optimized_operators
from qat.export.onnx.formats import take_pixels
from qat.training.data.transforms import ToInput
from tests.export.test_export_layers import quantized

IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def model_for(images: torch.Tensor, channels: int = 3) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return quantized(layers, images)


def run(path: Path, images: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: images})
    return np.asarray(scores)


def test_every_pixel_value_gives_the_same_answer_to_the_bit(tmp_path: Path) -> None:
    """All 256 values of every channel, and two lengths of the batch."""
    numbers = np.random.default_rng(0)
    pixels = (
        np.stack([numbers.permutation(256).reshape(16, 16) for _ in range(9)]).reshape(3, 16, 16, 3).astype(np.uint8)
    )
    normalized = ToInput(MEAN, STD)(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
    model = model_for(normalized)
    qat.export_onnx(model, tmp_path / "plain.onnx", normalized)
    qat.export_onnx(model, tmp_path / "pixels.onnx", normalized, normalization=(MEAN, STD))
    for count in (3, 1):
        expected = run(tmp_path / "plain.onnx", normalized[:count].numpy())
        assert np.array_equal(run(tmp_path / "pixels.onnx", pixels[:count]), expected)
    plain, taking = (optimized_operators(tmp_path / f"{name}.onnx") for name in ("plain", "pixels"))
    assert taking["QLinearConv"] == plain["QLinearConv"] == 1


def test_the_input_is_called_pixels_or_as_asked(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 8, 8)
    model = model_for(images)
    for names, expected in ((None, "pixels"), (["photo"], "photo")):
        qat.export_onnx(model, tmp_path / "x.onnx", images, normalization=(MEAN, STD), input_names=names)
        session = ort.InferenceSession((tmp_path / "x.onnx").read_bytes(), providers=["CPUExecutionProvider"])
        declared = session.get_inputs()[0]
        assert (declared.name, declared.type, declared.shape[1:]) == (expected, "tensor(uint8)", [8, 8, 3])


class Normalizing(nn.Module):
    """Keeps pixel_mean and pixel_std itself, as SAM and Detectron2 do."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.conv, self.names = nn.Conv2d(3, 4, 3), names
        for name in names:
            self.register_buffer(name, torch.rand(3, 1, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = x * getattr(self, name)
        return self.conv(x)


def test_a_model_may_have_tensors_of_the_same_names(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 8, 8)
    names = ("pixels", "pixels_float", "pixels_centred", "pixels_scaled", "normalized", "pixel_mean", "pixel_std")
    model = quantized(Normalizing(names), images)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    qat.export_onnx(model, tmp_path / "plain.onnx", images)
    qat.export_onnx(model, tmp_path / "pixels.onnx", images, normalization=(MEAN, STD))
    normalized = ToInput(MEAN, STD)(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()))
    expected = run(tmp_path / "plain.onnx", normalized.numpy())
    assert np.array_equal(run(tmp_path / "pixels.onnx", pixels), expected)


def test_the_constants_are_rounded_as_train_py_rounds_them(tmp_path: Path) -> None:
    """255 times a float32, not a float32 of 255 times a float64: for some numbers that is another one."""
    images = torch.randn(2, 3, 8, 8)
    mean, std = (0.1307, 0.4377, 0.5071), (0.3081, 0.2675, 0.2761)
    assert any(np.float32(255 * value) != np.float32(255) * np.float32(value) for value in mean + std)
    qat.export_onnx(model_for(images), tmp_path / "x.onnx", images, normalization=(mean, std))
    graph = onnx.load(tmp_path / "x.onnx").graph
    stored = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    for name, values in (("pixel_mean", mean), ("pixel_std", std)):
        assert stored[name].dtype == np.float32
        assert np.array_equal(stored[name], torch.tensor(values).mul(255).numpy())


@pytest.mark.parametrize(
    "normalization",
    [
        ((0.5,), (0.5,)), (MEAN, (0.1, -0.1, 0.1)), ((float("nan"), 0, 0), STD), (MEAN, (1e-50, 1, 1)),
        (MEAN, (1e39, 1, 1)), (0.5, 0.5), ((0, 0, 0),), (MEAN, STD, STD), ("abc", "def"), 5, (MEAN, None),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_mean_and_std_is_refused(normalization: Any) -> None:
    with pytest.raises(ValueError, match=r"must be \(mean, std\), each of 3 finite numbers, std above 0; got"):
        take_pixels(onnx.ModelProto(), normalization)


def test_a_file_of_other_channels_is_refused(tmp_path: Path) -> None:
    images = torch.randn(2, 1, 8, 8)
    with pytest.raises(
        ValueError, match=r"normalization is for one input of images \(N, 3, H, W\), the file has input"
    ):
        qat.export_onnx(model_for(images, 1), tmp_path / "x.onnx", images, normalization=(MEAN, STD))
