"""Estimators against what others computed: the casts and numbers of ml_dtypes, torch's fake-quantize ops.

The casts round once, in hardware-like code; ours round by arithmetic on the exponent. All finite float16 values and
every tie of every format go through both.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from qat.functional import fake_quantize, lsq_plus_quantize, lsq_quantize
from qat.functional.codebooks.apot import apot_levels
from qat.functional.codebooks.floats import FLOAT_FORMATS, float_quantize, mx_quantize
from tests.references import reference_codebooks as reference
from tests.references.leaves import leaf

CASTS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
APOT_LEVELS = {  # as printed in shared/RECIPES.md, over their maximum
    2: [0, 1 / 4, 1 / 2, 1],
    3: [0, 1 / 10, 2 / 10, 3 / 10, 4 / 10, 6 / 10, 8 / 10, 1],
    4: [k / 48 for k in (0, 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 33, 36, 48)],
}


def noise(*shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def in_range(name: str) -> Tensor:
    """Every finite float16, every number of the format, every tie, and the float32 neighbours of all; up to largest."""
    levels = torch.tensor(reference.float_levels(name), dtype=torch.float32)
    half = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    x = torch.cat([half[half.isfinite()], levels, (levels[1:] + levels[:-1]) / 2])
    x = torch.cat([x, torch.nextafter(x, torch.tensor(9e9)), torch.nextafter(x, torch.tensor(-9e9))])
    x = torch.cat([x, -x])
    return x[x.abs() <= levels[-1]]


def rounded(x: Tensor, name: str) -> Tensor:
    return torch.from_numpy(x.numpy().astype(CASTS[name]).astype(np.float32))


@pytest.mark.parametrize("name", list(FLOAT_FORMATS))
def test_every_float_format_has_the_numbers_of_the_standard(name):
    exponent_bits, mantissa_bits, bias, largest = FLOAT_FORMATS[name]
    assert (exponent_bits, mantissa_bits) == reference.FORMATS[name]
    assert (bias, largest) == (2 ** (exponent_bits - 1) - 1, reference.float_levels(name)[-1])
    codes = np.arange(2 ** (exponent_bits + mantissa_bits), dtype=np.uint8).view(CASTS[name]).astype(np.float32)
    expected = codes[np.isfinite(codes)]
    assert reference.float_levels(name).tolist() == expected.tolist()
    assert float_quantize(in_range(name), torch.tensor(1.0), name).abs().unique().tolist() == expected.tolist()


@pytest.mark.parametrize("name", list(FLOAT_FORMATS))
def test_float_quantize_rounds_as_the_cast_of_ml_dtypes(name):
    x = in_range(name)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        narrow = x.to(dtype)
        assert torch.equal(float_quantize(narrow, torch.tensor(1.0), name), rounded(narrow.float(), name).to(dtype))
    assert torch.equal(float_quantize(x / 32, torch.tensor(1 / 32), name), rounded(x, name) / 32)
    x, scale = noise(3000, spread=FLOAT_FORMATS[name][3]).double(), torch.tensor(0.3, dtype=torch.float64)
    y = float_quantize(x, scale, name)
    np.testing.assert_array_equal(y.numpy(), reference.float_quantize(name).forward(x.numpy(), np.array(0.3)))


def blocks_by_hand(x: Tensor, name: str, block_size: int) -> Tensor:
    """The last axis in blocks, from the bits: shared exponent from those of float32, elements cast by ml_dtypes."""
    blocks = x.unflatten(-1, (-1, block_size))
    exponents = (blocks.contiguous().view(torch.int32) >> 23 & 255).amax(-1, keepdim=True) - 127
    top, largest = (0, 127 / 64) if name == "int8" else (int(np.log2(FLOAT_FORMATS[name][3])), FLOAT_FORMATS[name][3])
    scale = torch.exp2((exponents - top).clamp(-127, 127).double()).float()
    v = (blocks / scale).clamp(-largest, largest)
    cast = torch.round(v * 64) / 64 if name == "int8" else rounded(v, name)
    return (cast * scale).flatten(-2)


@pytest.mark.parametrize("name", [*FLOAT_FORMATS, "int8"])
def test_mx_blocks_decoded_from_their_bits(name):
    """Blocks from 1e-9 to 1e9, uneven within; one in eight elements is zero."""
    x = noise(6, 256, seed=1) * torch.exp(noise(6, 256, seed=2)) * 10.0 ** torch.arange(-9, 9, 3)[:, None]
    x[:, ::8] = 0
    assert torch.equal(mx_quantize(x, name), blocks_by_hand(x, name, 32))
    assert torch.equal(mx_quantize(x, name, 8), blocks_by_hand(x, name, 8))
    assert torch.equal(mx_quantize(x.T, name, axis=0), blocks_by_hand(x, name, 32).T)
    assert torch.equal(mx_quantize(x[:, :5], name), blocks_by_hand(x[:, :5], name, 5))


@pytest.mark.parametrize("name", [*FLOAT_FORMATS, "int8"])
def test_mx_scales_stay_within_the_exponents_of_e8m0(name):
    """The smallest shared scale is 2^-127, the exponent of which has 8 bits; exact powers of two are their own."""
    x = torch.tensor([2.0**k for k in range(-149, 128)])[:, None]
    assert torch.equal(mx_quantize(x, name), blocks_by_hand(x, name, 1))
    assert torch.equal(mx_quantize(x[40:], name), x[40:])


@pytest.mark.parametrize("m", range(1, 9))
def test_apot_levels_are_those_of_the_paper(m):
    exact = reference.apot_levels(m)
    assert apot_levels(m) == tuple(map(float, exact)) and len(exact) == 2**m
    if m in APOT_LEVELS:
        assert list(apot_levels(m)) == APOT_LEVELS[m]


@pytest.mark.parametrize(("qmin", "qmax", "zero_point"), [(0, 15, 0), (0, 15, 3), (-8, 7, 0), (-128, 127, 5)])
def test_gradients_equal_torchs_learnable_op(qmin, qmax, zero_point):
    """Zero points >= 0, where its backward is right; not within half a step of a bound, where the masks differ."""
    step = 0.37
    v = noise(4000, spread=(qmax - qmin) / 2) + zero_point
    beside = ((v > qmax) & (v <= qmax + 0.75)) | ((v < qmin) & (v >= qmin - 0.75))
    tie = (v - v.floor() - 0.5).abs() < 1e-3
    x, grad = (v[~beside & ~tie] - zero_point) * step, noise(4000, seed=1)[~beside & ~tie]
    assert len(x) > 2000

    def pulled(function, *arguments):
        leaves = [leaf(values, torch.float32) for values in (x, [step], [float(zero_point)])]
        y = function(*leaves, *arguments)
        y.backward(grad)
        return y.detach(), *(each.grad for each in leaves)

    expected = pulled(torch._fake_quantize_learnable_per_tensor_affine, qmin, qmax, 1.0)
    got = pulled(lsq_plus_quantize, qmin, qmax, 1.0)
    for ours, theirs, rtol in zip(got, expected, (1e-6, 0.0, 1e-4, 1e-4), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-6 if rtol else 0.0)
    torch.testing.assert_close(fake_quantize(x, torch.tensor(step), torch.tensor(zero_point), qmin, qmax), expected[0])
    if zero_point == 0:
        y, grad_x, grad_step, _ = pulled(lambda x, step, zero: lsq_quantize(x, step + 0 * zero, qmin, qmax))
        torch.testing.assert_close(y, expected[0])
        assert torch.equal(grad_x, expected[1])
        torch.testing.assert_close(grad_step, expected[2], rtol=1e-4, atol=1e-6)
