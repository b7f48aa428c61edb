"""QuantBilinear: two inputs with a grid each, against torch's layer and NumPy's integers."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import qat
from qat.layers import QuantBilinear
from qat.quantizer import Quantizer, create_quantizer
from qat.spec import QuantSpec

QUANTIZER_KEYS = {f"weight_quantizer.{name}" for name in ("scale", "smallest_scale", "calibrated")}


def grid_for(x: torch.Tensor, bits: int = 8) -> Quantizer:
    """A calibrated unsigned affine quantizer for x."""
    quantizer = create_quantizer(QuantSpec(bits=bits, signed=False, symmetric=False))
    quantizer.set_range(x.min().clamp(max=0), x.max().clamp(min=0))
    return quantizer


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


def test_its_own_quantizers_calibrate_and_learn() -> None:
    torch.manual_seed(0)
    layer = QuantBilinear(5, 7, 4)
    batch = {"x1": torch.randn(8, 5), "x2": 30 * torch.rand(8, 7)}
    qat.calibrate(layer, [batch])
    assert layer.input_quantizer is not None and layer.other_quantizer is not None
    assert layer.other_quantizer.scale.item() > 3 * layer.input_quantizer.scale.item()
    layer(**batch).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert bool((parameter.grad != 0).any()), f"{name} does not learn"
    trained = layer(**batch)
    layer.eval()
    expected = layer(**batch)
    torch.testing.assert_close(expected, trained, rtol=1e-3, atol=1e-2)
    assert torch.equal(copy.deepcopy(layer)(**batch), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(**batch), expected)
    fresh = QuantBilinear(5, 7, 4).eval()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(**batch), expected)
    layer.zero_grad()
    expected.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters()), "evaluation is differentiable"


@pytest.mark.parametrize("plain", [nn.Bilinear(5, 7, 4), nn.Bilinear(5, 7, 4, bias=False).double().eval()])
def test_from_float_and_back(plain: nn.Bilinear) -> None:
    state = torch.get_rng_state()
    layer = QuantBilinear.from_float(plain)
    back = layer.to_float()
    assert torch.equal(torch.get_rng_state(), state), "from_float or to_float draws random numbers"
    assert type(back) is nn.Bilinear and back.weight is layer.weight is plain.weight and back.bias is plain.bias
    assert back.extra_repr() == plain.extra_repr() and back.training == layer.training == plain.training
    assert isinstance(layer, QuantBilinear) and layer.input_quantizer is None and layer.other_quantizer is None
    x1, x2 = torch.randn(3, 5, dtype=plain.weight.dtype), torch.randn(3, 7, dtype=plain.weight.dtype)
    torch.testing.assert_close(layer(x1, x2), plain(x1, x2), rtol=0.05, atol=0.05)
    assert set(layer.state_dict()) == set(plain.state_dict()) | QUANTIZER_KEYS
    state_of_float = {name: value for name, value in layer.state_dict().items() if "_quantizer." not in name}
    nn.Bilinear(5, 7, 4, bias=plain.bias is not None).load_state_dict(state_of_float, strict=True)


def test_from_float_with_an_activation_spec_gives_both_inputs_a_quantizer() -> None:
    layer = QuantBilinear.from_float(nn.Bilinear(5, 7, 4), activation_spec=QuantSpec(bits=4))
    keys = {name for name in layer.state_dict() if name.endswith("quantizer.scale")}
    assert keys == {f"{name}_quantizer.scale" for name in ("weight", "input", "other")}


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrised_layer(wrap: Any) -> None:
    torch.manual_seed(0)
    plain = wrap(nn.Bilinear(5, 7, 4)).eval()
    layer = QuantBilinear.from_float(plain)
    x1, x2 = torch.randn(3, 5), torch.randn(3, 7)
    torch.testing.assert_close(layer(x1, x2), plain(x1, x2), rtol=0.05, atol=0.05)
    assert set(layer.state_dict()) == set(plain.state_dict()) | QUANTIZER_KEYS
    for shown in (layer, copy.deepcopy(layer)):
        shown.zero_grad()
        shown(x1, x2).square().sum().backward()
        for name, parameter in shown.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
            assert bool((parameter.grad != 0).any()), f"{name} does not learn"
    assert torch.equal(layer.to_float()(x1, x2), plain(x1, x2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    layer, inputs = example(dtype=dtype)
    inputs.update(x1=inputs["x1"].to(dtype), x2=inputs["x2"].to(dtype))
    trained = layer(**inputs)
    deployed = layer.eval()(**inputs)
    assert trained.dtype == deployed.dtype == dtype
    torch.testing.assert_close(deployed, trained, rtol=0.02, atol=0.5 if dtype is torch.bfloat16 else 0.01)


def test_integers_ignore_autocast() -> None:
    layer, inputs = example()
    layer.eval()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(**inputs)
    assert torch.equal(mixed, layer(**inputs))


def test_meta_device() -> None:
    layer = QuantBilinear(5, 7, 4, device="meta")
    assert all(tensor.is_meta for tensor in layer.state_dict().values())
    assert layer.weight_quantizer.scale.shape == (4, 1, 1)


def test_two_inputs_two_grids() -> None:
    assert QuantBilinear.quantizer_arguments == ("input_quantizer", "other_quantizer")


def test_what_is_refused() -> None:
    layer, inputs = example()
    with pytest.raises(
        ValueError,
        match=r"^QuantBilinear\.integers: other_quantizer must be the quantizer of the second input, got None$",
    ):
        layer.integers(inputs["input_quantizer"])
    with pytest.raises(TypeError, match=r"^QuantBilinear\.from_float: expected Bilinear, got Linear$"):
        QuantBilinear.from_float(nn.Linear(1, 1))
