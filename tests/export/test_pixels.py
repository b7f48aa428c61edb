"""Files that take uint8 pixels: the same integers, to the bit, as from images that were normalised outside."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

import qat
from qat.export import optimized_operators
from qat.training.data.transforms import ToInput

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def model_for(images: torch.Tensor, channels: int = 3) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    prepared = qat.prepare(layers)
    qat.calibrate(prepared, [images])
    return prepared.eval()


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


@pytest.mark.parametrize(
    ("normalization", "channels", "said"),
    [
        (((0.5,), (0.5,)), 3, "mean and std need 3 values, std above 0"),
        ((MEAN, (0.1, 0.0, 0.1)), 3, "mean and std need 3 values, std above 0"),
        ((MEAN, STD), 1, r"normalization is for one input of images \(N, 3, H, W\), the file has input"),
    ],
)
def test_what_does_not_fit_is_refused(normalization: Any, channels: int, said: str, tmp_path: Path) -> None:
    images = torch.randn(2, channels, 8, 8)
    with pytest.raises(ValueError, match=said):
        qat.export_onnx(model_for(images, channels), tmp_path / "x.onnx", images, normalization=normalization)
