"""The blocks of MX lie along the axis that the layer behind sums over, held to a NumPy reference."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qat

Shape = tuple[int, ...]
LAYERS: dict[str, tuple[Callable[[], nn.Module], Shape, int]] = {
    **{f"linear, {len(shape)} axes": (lambda: nn.Linear(8, 4), shape, -1) for shape in [(8,), (3, 8), (2, 3, 8)]},
    "linear, 4 axes": (lambda: nn.Linear(8, 4), (2, 5, 3, 8), -1),
    "conv1d": (lambda: nn.Conv1d(8, 4, 3), (2, 8, 6), 1),
    "conv2d": (lambda: nn.Conv2d(8, 4, 3), (2, 8, 5, 6), 1),
    "conv2d, one image": (lambda: nn.Conv2d(8, 4, 3), (8, 5, 6), 0),
    "conv3d": (lambda: nn.Conv3d(8, 4, 3), (2, 8, 4, 5, 6), 1),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(8, 4, 3), (2, 8, 6), 1),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(8, 4, 3), (2, 8, 5, 6), 1),
}


def reference(x: np.ndarray, axis: int, size: int) -> np.ndarray:
    """int8 with 6 bits behind the point, times the power of two below each block's largest value."""
    rows = np.moveaxis(x, axis, -1)
    blocks = rows.reshape(*rows.shape[:-1], -1, size)
    scale = np.exp2(np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))))
    found = np.clip(np.round(blocks / scale * 64), -127, 127) / 64 * scale
    return np.moveaxis(found.reshape(rows.shape), -1, axis)


class Functional(nn.Module):
    """A layer whose weight is a parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.weight)


LAYERS["functional conv1d"] = (Functional, (2, 8, 6), 1)


@pytest.mark.parametrize("name", LAYERS)
def test_blocks_lie_along_what_is_summed(name: str) -> None:
    make, shape, axis = LAYERS[name]
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(-2, 2, 8).reshape(
        [8 if i == axis % len(shape) else 1 for i in range(len(shape))]
    )
    spec = {"rule": "mxint8", "bits": 8, "symmetric": True, "signed": True, "options": {"block_size": 4}}
    model = qat.prepare(nn.Sequential(make()), qat.QuantRecipe(activation=spec), x)
    seen: list[Tensor] = []
    model.get_submodule("input_quantizer").register_forward_hook(lambda module, args, y: seen.append(y))
    qat.calibrate(model, [(x,)])
    model.train()(x)
    assert np.array_equal(seen[-1].detach().numpy(), reference(x.numpy(), axis, 4).astype(np.float32))


def test_a_layers_own_quantizer_knows_it_too() -> None:
    spec = qat.QuantSpec(rule="mxint8", bits=8, symmetric=True, signed=True)
    for layer, axis in [
        (qat.QuantLinear(8, 4, activation_spec=spec), -1),
        (qat.QuantConv1d(8, 4, 3, activation_spec=spec), -2),
    ]:
        assert layer.input_quantizer is not None and layer.input_quantizer.summed_axis == axis
