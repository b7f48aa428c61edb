"""Quantized layers: the float path of training, the integer path of evaluation, and BatchNorm folding."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qat
from qat.layers import QuantConv2d, QuantLayer, QuantLinear, fold_weight
from qat.quantizer import Quantizer, create_quantizer
from qat.spec import QuantSpec


def grid_for(x: torch.Tensor) -> Quantizer:
    """A calibrated 8-bit unsigned affine quantizer for x."""
    quantizer = create_quantizer(QuantSpec(signed=False, symmetric=False))
    quantizer.set_range(x.min().clamp(max=0), x.max().clamp(min=0))
    return quantizer


def trained_norm(channels: int, seed: int = 0) -> nn.BatchNorm2d:
    """A BatchNorm with gammas of both signs, one of them exactly zero."""
    generator = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm2d(channels).eval()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(channels, generator=generator))
        norm.weight[0] = 0.0
        norm.weight[1] = -0.7
        norm.bias.copy_(torch.randn(channels, generator=generator))
        norm.running_mean.copy_(torch.randn(channels, generator=generator))
        norm.running_var.copy_(torch.rand(channels, generator=generator) + 0.1)
    return norm


def integer_reference(layer: QuantConv2d, grid: Quantizer, norm: nn.BatchNorm2d | None, x: torch.Tensor) -> np.ndarray:
    """The deployed arithmetic in NumPy: int64 accumulation, float64 rescaling. x lies on the grid."""
    scale_x = grid.scale.detach().double()
    integers = layer.integers(grid, norm)
    codes_x = (x.double() / scale_x).round()
    total = F.conv2d(
        codes_x, integers.codes.detach().double(), None, layer.stride, layer.padding, layer.dilation, layer.groups
    )
    total = total + integers.bias_codes.detach().double()[:, None, None]
    return (total * integers.accumulator_scale.detach().double()[:, None, None]).numpy()


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("geometry", [{"padding": 1}, {"stride": 2, "padding": 2, "dilation": 2}, {"groups": 4}])
def test_evaluation_is_integer_arithmetic(geometry: dict[str, int], bias: bool, with_norm: bool) -> None:
    torch.manual_seed(0)
    layer = QuantConv2d(8, 12, 3, bias=bias, activation_spec=None, **geometry).eval()
    norm = trained_norm(12) if with_norm else None
    raw = torch.randn(2, 8, 9, 9)
    grid = grid_for(raw)
    x = grid(raw).detach()
    got = layer(x, grid, norm).detach().numpy()
    np.testing.assert_allclose(got, integer_reference(layer, grid, norm, x), rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("with_norm", [False, True])
def test_integer_path_differs_from_the_float_path_by_the_bias_rounding_only(with_norm: bool) -> None:
    torch.manual_seed(1)
    layer = QuantConv2d(8, 12, 3, activation_spec=None).eval()
    norm = trained_norm(12) if with_norm else None
    raw = torch.randn(2, 8, 9, 9)
    grid = grid_for(raw)
    x = grid(raw).detach()
    plain = F.conv2d(x, layer.weight_quantizer(layer.weight), layer.bias)
    plain = norm(plain) if norm is not None else plain
    half_a_unit = layer.integers(grid, norm).accumulator_scale.detach()[:, None, None] / 2
    gap = (layer(x, grid, norm) - plain).abs()
    assert bool((gap <= half_a_unit + 2e-5).all())


def test_gamma_zero_and_negative_gamma_are_exact() -> None:
    torch.manual_seed(2)
    layer = QuantConv2d(4, 3, 3, bias=False, activation_spec=None).eval()
    norm = trained_norm(3)
    raw = torch.rand(1, 4, 6, 6)
    grid = grid_for(raw)
    integers = layer.integers(grid, norm)
    unfolded = layer.weight_quantizer.codes(layer.weight)
    assert bool((integers.codes[0] == 0).all()), "gamma = 0 leaves the bias alone"
    assert torch.equal(integers.codes[1], -unfolded[1]), "gamma < 0 negates the integers"
    assert torch.equal(integers.codes[2].abs(), unfolded[2].abs())
    assert bool((integers.scale > 0).all()) and bool(torch.isfinite(integers.bias_codes).all())
    y = layer(grid(raw), grid, norm)
    torch.testing.assert_close(y[:, 0], norm.bias[0].expand_as(y[:, 0]), rtol=1e-6, atol=0)


def test_a_bias_beyond_int32_shrinks_the_codes_not_the_bias() -> None:
    codes, scale = torch.tensor([[100.0], [100.0]]), torch.tensor([[1e-12], [1.0]])
    integers = fold_weight(codes, scale, torch.tensor([5.0, 5.0]), torch.tensor(1e-3))
    assert float(integers.bias_codes.abs().max()) <= 2**30
    torch.testing.assert_close(integers.bias_codes * integers.accumulator_scale, torch.tensor([5.0, 5.0]))
    assert integers.codes[1].item() == 100 and integers.scale[1].item() == 1.0


def test_bias_and_products_fit_int32_together() -> None:
    codes = torch.full((1, 60_000), 127.0)  # 255 times their sum is nine tenths of the int32 maximum
    integers = fold_weight(codes, torch.tensor([[1.0]]), torch.tensor([3e8]), torch.tensor(1.0))
    assert float(integers.bias_codes) + 255 * float(integers.codes.sum()) < 2**31
    torch.testing.assert_close(integers.bias_codes * integers.accumulator_scale, torch.tensor([3e8]))


def test_an_all_zero_channel_keeps_its_bias() -> None:
    layer = QuantLinear(6, 2, activation_spec=None).eval()
    with torch.no_grad():
        layer.weight[0].zero_()
        layer.bias.copy_(torch.tensor([0.123, -0.5]))
    layer.calibrate_weight()
    x = torch.rand(3, 6)
    grid = grid_for(x)
    y = layer(grid(x), grid)
    torch.testing.assert_close(y[:, 0], torch.full((3,), 0.123), rtol=1e-6, atol=0)


def test_standalone_layers_train_and_calibrate() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(QuantConv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), QuantLinear(8 * 36, 5))
    batches = [torch.randn(4, 3, 6, 6) for _ in range(3)]
    qat.calibrate(model, batches)
    model(batches[0]).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()), name
        assert bool((parameter.grad != 0).any()), f"{name} does not learn"
    trained = model(batches[0])
    model.eval()
    torch.testing.assert_close(model(batches[0]), trained, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("float_layer", "twin"),
    [
        (nn.Conv2d(4, 6, (3, 5), stride=2, padding="valid", bias=False), QuantConv2d),
        (nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4, padding_mode="reflect"), QuantConv2d),
        (nn.Linear(7, 3, bias=False), QuantLinear),
        (nn.Linear(7, 3).double().eval(), QuantLinear),
    ],
)
def test_from_float_takes_over_parameters_and_geometry(float_layer: nn.Module, twin: type[QuantLayer]) -> None:
    state = torch.get_rng_state()
    layer = twin.from_float(float_layer)
    assert torch.equal(torch.get_rng_state(), state), "from_float draws random numbers"
    assert layer.weight is float_layer.weight and layer.bias is float_layer.bias
    assert layer.training == float_layer.training
    shape = (2, 4, 9, 9) if twin is QuantConv2d else (2, 7)
    x = torch.randn(shape, dtype=layer.weight.dtype)
    torch.testing.assert_close(layer(x), float_layer(x), rtol=0.05, atol=0.05)
    extra = {f"weight_quantizer.{name}" for name in ("scale", "smallest_scale", "calibrated")}
    assert set(layer.state_dict()) == set(float_layer.state_dict()) | extra


def test_from_float_refuses_another_type() -> None:
    with pytest.raises(TypeError, match=r"^QuantLinear\.from_float: expected Linear, got Conv2d$"):
        QuantLinear.from_float(nn.Conv2d(1, 1, 1))


def test_activation_spec_must_be_a_spec() -> None:
    with pytest.raises(TypeError, match=r"^activation_spec must be a QuantSpec, None or 'default', got 8$"):
        QuantLinear(2, 2, activation_spec=8)  # type: ignore[arg-type]


def test_padding_is_exact_zero_on_an_affine_grid() -> None:
    """Zero padding has the value 0.0, the zero point; it adds nothing to outputs at the border."""
    layer = QuantConv2d(1, 1, 3, padding=1, bias=False, activation_spec=None).eval()
    x = torch.full((1, 1, 4, 4), -1.0)
    grid = grid_for(torch.tensor([-1.0, 2.0]))
    y = layer(grid(x), grid)
    torch.testing.assert_close(
        y[0, 0, 0, 0], -layer.weight_quantizer(layer.weight)[0, 0, 1:, 1:].sum(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    layer = QuantConv2d(3, 4, 3, activation_spec=None, dtype=dtype)
    x = torch.randn(1, 3, 8, 8, dtype=dtype)
    grid = grid_for(x.float())
    for mode in (layer.train(), layer.eval()):
        assert mode(grid(x), grid).dtype == dtype


def test_integer_path_ignores_autocast() -> None:
    torch.manual_seed(0)
    layer = QuantConv2d(8, 4, 3, activation_spec=None).eval()
    x = torch.randn(1, 8, 8, 8)
    grid = grid_for(x)
    x = grid(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x, grid)
    assert torch.equal(mixed, layer(x, grid))
