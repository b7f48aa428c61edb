"""The integers of a layer: BatchNorm and bias folded into them, and padding."""

import torch
from twin_case import grid_for, trained_norm

from qat.layers import QuantConv2d, QuantLinear, fold_weight


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


def test_padding_is_exact_zero_on_an_affine_grid() -> None:
    """Zero padding has the value 0.0, the zero point; it adds nothing to outputs at the border."""
    layer = QuantConv2d(1, 1, 3, padding=1, bias=False, activation_spec=None).eval()
    x = torch.full((1, 1, 4, 4), -1.0)
    grid = grid_for(torch.tensor([-1.0, 2.0]))
    y = layer(grid(x), grid)
    torch.testing.assert_close(
        y[0, 0, 0, 0], -layer.weight_quantizer(layer.weight)[0, 0, 1:, 1:].sum(), rtol=1e-5, atol=1e-6
    )
