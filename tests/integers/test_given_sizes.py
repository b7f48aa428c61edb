"""Sizes that come from tensors, and slices of what a split gives: in evaluation, `convert` and the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.export.onnxruntime.verification import compare_layers
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain, draw

Between = Callable[[Tensor, Tensor], Tensor]

FREE: dict[str, Between] = {
    "a skip's size": lambda a, b: F.interpolate(b, size=a.shape[-2:]) + a,
    "by name": lambda a, b: F.interpolate(input=b, size=a.shape[-2:]) + a,
    "a skip's size, bilinear": lambda a, b: F.interpolate(b, size=a.shape[-2:], mode="bilinear") + a,
    "numbers": lambda a, b: F.interpolate(b, size=(b.shape[2] * 2, b.shape[3] * 2)),
    "a ratio": lambda a, b: F.interpolate(b, scale_factor=a.shape[2] / b.shape[2]) + a,
    "adaptive average": lambda a, b: F.adaptive_avg_pool2d(a, b.shape[-2:]) + b,
    "groups": lambda a, b: F.group_norm(b, b.shape[1] // 4),
    "slices of chunks": lambda a, b: torch.cat(b.chunk(2, 1)[::-1], 1),
    "slices of pieces": lambda a, b: torch.cat((*b.split([2, 6], 1)[1:], b[:, :2]), 1),
    "only its size": lambda a, b: F.pad(a, (0, b.shape[3], 0, 0))[:, :, :: b.shape[2] // 8],
    "a crop": lambda a, b: a[:, :, : b.shape[2], : b.shape[3]] + b,
    "padding": lambda a, b: F.pad(b, (0, a.shape[3] - b.shape[3], 0, a.shape[2] - b.shape[2])) + a,
}
"""What a model computes of two maps, the second half as large, where a size is free."""

FIXED: dict[str, Between] = {
    "average": lambda a, b: F.avg_pool2d(b, b.size()[2:]),
    "average, numbers": lambda a, b: F.avg_pool2d(b, (b.shape[2], b.shape[3])),
    "maximum": lambda a, b: F.max_pool2d(b, (b.shape[2] // 2, b.shape[3] // 2)),
    "layer norm": lambda a, b: F.layer_norm(b, b.shape[1:]),
    "adaptive maximum": lambda a, b: F.adaptive_max_pool2d(a, b.shape[-2:]) + b,  # torch.export takes it for a number
}
"""Where another size is another model."""


def prepared(between: Between) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        a = self.first(x).relu()
        b = self.second(a).relu()
        return self.last(between(a, b))  # type: ignore[no-any-return]

    layers = {"first": nn.Conv2d(3, 8, 3, padding=1), "second": nn.Conv2d(8, 8, 3, stride=2, padding=1)}
    return quantized(Plain(forward, **layers, last=nn.Conv2d(8, 4, 1)), draw(4, 3, 16, 16))


@pytest.mark.parametrize("name", [*FREE, *FIXED])
def test_evaluation_without_gradients_is_that_with_them(name: str) -> None:
    model = prepared((FREE | FIXED)[name])
    for shape in ((2, 3, 16, 16), *(((1, 3, 20, 24),) if name in FREE else ())):
        x = torch.randn(shape)
        expected = model(x)
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        torch.testing.assert_close(qat.convert(model)(x), expected, rtol=0, atol=0)
        torch.testing.assert_close(qat.convert(model, "reference")(x), expected, rtol=0, atol=1e-6)


WRITTEN = ["a skip's size", "a ratio", "only its size", "slices of chunks", "average", "maximum", "layer norm"]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_file_answers_as_the_model(name: str, tmp_path: Path) -> None:
    model, x = prepared((FREE | FIXED)[name]), torch.randn(2, 3, 16, 16)
    qat.export_onnx(model, path := tmp_path / "model.onnx", x)
    assert qat.verify_onnx(path, model, [x]).max_difference < 1e-5
    assert not any(each.differing for each in compare_layers(path, model, x))
