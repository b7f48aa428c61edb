"""QuantBilinear: two inputs with a grid each, against torch's layer and NumPy's integers."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twin_case import grid_for

import qat
from qat.layers import QuantBilinear
from qat.spec import QuantSpec


def example(shape: tuple[int, ...] = (6,), **options: Any) -> tuple[QuantBilinear, Any]:
    """A layer and its keyword arguments: inputs on two 4-bit grids with very different steps."""
    torch.manual_seed(0)
    layer = QuantBilinear(5, 7, 4, **options, activation_spec=None)
    first, second = torch.randn(*shape, 5), 30 * torch.rand(*shape, 7)
    grid, other_quantizer = grid_for(first, 4), grid_for(second, 4)
    inputs = {
        "x1": grid(first).detach(),
        "x2": other_quantizer(second).detach(),
        "input_quantizer": grid,
        "other_quantizer": other_quantizer,
    }
    return layer, inputs


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_training_is_torchs_layer_on_a_quantized_weight(shape: tuple[int, ...], bias: bool) -> None:
    layer, inputs = example(shape, bias=bias)
    scale = layer.weight_quantizer.scale.detach()
    weight = torch.clamp(torch.round(layer.weight.detach() / scale), -127, 127) * scale
    expected = F.bilinear(inputs["x1"], inputs["x2"], weight, layer.bias)
    torch.testing.assert_close(layer(**inputs), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.eval()(inputs["x1"], inputs["x2"]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_evaluation_is_integer_arithmetic(shape: tuple[int, ...], bias: bool) -> None:
    layer, inputs = example(shape, bias=bias)
    layer.eval()
    scales = layer.weight_quantizer.scale.detach().numpy().reshape(4)
    codes = np.clip(np.round(layer.weight.detach().numpy() / scales[:, None, None]), -127, 127).astype(np.int64)
    steps = [inputs[name].scale.item() for name in ("input_quantizer", "other_quantizer")]
    first, second = (
        np.round(inputs[name].double().numpy() / step).astype(np.int64)
        for name, step in zip(("x1", "x2"), steps, strict=True)
    )
    unit = scales.astype(np.float64) * steps[0] * steps[1]
    offset = np.round(layer.bias.detach().double().numpy() / unit).astype(np.int64) if bias else np.zeros(4, np.int64)
    expected = (np.einsum("...i,oij,...j->...o", first, codes, second) + offset) * unit
    integers = layer.integers(inputs["input_quantizer"], other_quantizer=inputs["other_quantizer"])
    np.testing.assert_array_equal(integers.codes.detach().numpy(), codes)
    np.testing.assert_array_equal(integers.bias_codes.detach().numpy(), offset)
    got = layer(**inputs).detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=4e-7, atol=1e-7)
    fake = layer(inputs["x1"], inputs["x2"]).detach().numpy()
    assert bias == (np.abs(got - fake).max() > 1e-4), "the rounding of the bias is all that differs"


def test_sums_beyond_float32_are_exact() -> None:
    """The sum of 1024 products of three 8-bit integers exceeds float32's 24 bits and int32's 31."""
    torch.manual_seed(0)
    layer = QuantBilinear(32, 32, 2, bias=False, activation_spec=None).eval()
    unit_grid = grid_for(torch.tensor([0.0, 255.0]))
    with torch.no_grad():
        layer.weight.copy_(torch.where(torch.rand(2, 32, 32) < 0.6, 127.0, -126.0))
    layer.calibrate_weight()
    x1, x2 = torch.randint(200, 256, (3, 32)).float(), torch.randint(200, 256, (3, 32)).float()
    exact = np.einsum("ni,oij,nj->no", *(tensor.detach().numpy().astype(np.int64) for tensor in (x1, layer.weight, x2)))
    assert np.abs(exact).max() > 2**24
    got = layer(x1.double(), x2.double(), unit_grid, unit_grid).detach().numpy()
    np.testing.assert_array_equal(got, exact)


def test_without_two_integer_grids_it_is_evaluated_as_trained() -> None:
    layer, inputs = example()
    trained = layer(**inputs)
    layer.eval()
    assert not torch.equal(layer(**inputs), trained)
    assert torch.equal(layer(inputs["x1"], inputs["x2"], input_quantizer=inputs["input_quantizer"]), trained)
    assert torch.equal(layer(inputs["x1"], inputs["x2"], other_quantizer=inputs["other_quantizer"]), trained)
    for spec in (QuantSpec(granularity="group", group_size=5), QuantSpec(bits=4, rule="apot")):
        other, again = example(weight_spec=spec)
        assert torch.equal(other(**again), other.eval()(**again))


def test_from_float_with_an_activation_spec_gives_both_inputs_a_quantizer() -> None:
    layer = QuantBilinear.from_float(nn.Bilinear(5, 7, 4), activation_spec=QuantSpec(bits=4))
    keys = {name for name in layer.state_dict() if name.endswith("quantizer.scale")}
    assert keys == {f"{name}_quantizer.scale" for name in ("weight", "input", "other")}
    qat.calibrate(layer, [{"x1": torch.randn(8, 5), "x2": 30 * torch.rand(8, 7)}])
    assert layer.other_quantizer.scale.item() > 3 * layer.input_quantizer.scale.item()
