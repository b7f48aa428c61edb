"""QuantSpec: its integers, its text, every mistake; initial ranges against brute force in NumPy float64."""

import copy
import dataclasses
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qat.functional import lsq_quantize
from qat.ranges import initial_range, scale_and_zero_point
from qat.spec import QuantSpec, default_activation_spec, default_spec, default_weight_spec
from tests.references import reference
from tests.references.rule_specs import plain


@pytest.mark.parametrize("bits", range(2, 17))
def test_bounds_are_those_of_the_grid(bits):
    for signed, narrow in ((True, False), (True, True), (False, False)):
        spec = QuantSpec(bits=bits, signed=signed, narrow_range=narrow)
        assert (spec.qmin, spec.qmax) == reference.bounds(bits, signed, narrow)
        assert type(spec.qmin) is int and type(spec.qmax) is int


def test_the_defaults_are_the_documented_ones():
    weight, activation = default_weight_spec(), default_activation_spec()
    assert (weight.qmin, weight.qmax, weight.symmetric, weight.granularity) == (-127, 127, True, "channel")
    assert (activation.qmin, activation.qmax, activation.symmetric, activation.granularity) == (0, 255, False, "tensor")
    assert default_spec("weight") == weight and default_spec("activation") == activation
    assert QuantSpec(percentile=100).percentile == 100 and QuantSpec(percentile=50.01).percentile == 50.01
    written = (8, True, True, "channel", "lsq", True, "minmax", 99.99, "sample")
    assert weight == QuantSpec(*written, options={}, ewgs="none")


EVERY_FORM = {
    "new": QuantSpec(bits=4, init="mse"),
    "replaced": replace(QuantSpec(bits=4), init="mse"),
    "changed": QuantSpec(bits=4).changed({"init": "mse"}),
    "copied": copy.deepcopy(QuantSpec(bits=4, init="mse")),
    "pickled": pickle.loads(pickle.dumps(QuantSpec(bits=4, init="mse"))),
}


@pytest.mark.parametrize("spec", EVERY_FORM.values(), ids=EVERY_FORM.keys())
def test_what_is_left_out_is_left_open_and_stays_so_in_copies(spec):
    assert spec == QuantSpec(bits=4, init="mse") and hash(spec) == hash(QuantSpec(bits=4, init="mse"))
    assert repr(spec) == str(spec) == "QuantSpec(bits=4, init='mse')" and eval(repr(spec)) == spec
    assert spec.granularity is None and spec.signed is None
    weight, activation = (spec.resolved(default_spec(role)) for role in ("weight", "activation"))
    assert weight == replace(default_weight_spec(), bits=4, init="mse") != spec
    assert activation == replace(default_activation_spec(), bits=4)


def test_a_complete_spec_stays_as_it_is():
    assert plain().resolved(default_activation_spec()) is not None
    for default in (default_weight_spec(), default_activation_spec(), plain(max_magnitude=5)):
        assert plain().resolved(default) == plain()


@pytest.mark.parametrize(("change", "left"), [
    ({"rule": "pact"}, {"rule": "pact", "options": {}, "grad_scale": "none"}),
    ({"rule": "dsq", "bits": 3}, {"bits": 3, "narrow_range": False}),
    ({"granularity": "tensor"}, {"granularity": "tensor", "group_size": None}),
    ({"ewgs": "none"}, {"ewgs": "none", "ewgs_delta": None}),
    ({"signed": False}, {"signed": False, "narrow_range": False}),
    ({"bits": None, "init": None}, {}),
    ({"max_magnitude": None}, {"max_magnitude": None}),
])  # fmt: skip
def test_what_belongs_to_an_old_value_goes_with_it(change, left):
    spec = QuantSpec(4, True, True, "group", "dsq", True, "mse", 99.0, "batch", 8, {"alpha": 0.3}, "fixed", 0.1, 5)
    assert spec.changed(change) == replace(spec, **left)


@pytest.mark.parametrize(("change", "narrow", "init"), [
    ({"bits": 16}, True, "minmax"),
    ({"bits": 4}, True, "mse"),  # extremes leave most of few levels to a few values
    ({"bits": 3}, False, "mse"),
    ({"bits": 2}, False, "mse"),  # four levels in place of three
    ({"bits": 1}, True, "mse"),
    ({"bits": 2, "narrow_range": True, "init": "percentile"}, True, "percentile"),
    ({"bits": 4, "rule": "minmax"}, True, "minmax"),  # which takes no other
    ({"bits": 4, "rule": "ema"}, True, "minmax"),  # to which it moves
    ({"bits": 2, "signed": False}, False, "mse"),
])  # fmt: skip
def test_few_bits_have_choices_of_their_own(change, narrow, init):
    weight = default_weight_spec().changed(change)
    assert (weight.narrow_range, weight.init) == (narrow, init)
    assert weight.changed({"bits": 8, "signed": True}).narrow_range
    assert QuantSpec(**change).resolved(default_weight_spec()) == weight


def test_a_range_that_was_chosen_against_the_bits_stays():
    wide = default_weight_spec().changed({"narrow_range": False})
    assert not wide.changed({"bits": 4}).narrow_range and not wide.changed({"bits": 2}).narrow_range
    narrow = default_weight_spec().changed({"bits": 2, "narrow_range": True})
    assert narrow.changed({"bits": 3}).narrow_range and narrow.changed({"bits": 8}).narrow_range


def test_what_is_left_open_counts_as_signed_and_eight_bits():
    bounds = {
        QuantSpec(bits=4): (-8, 7),
        QuantSpec(signed=False): (0, 255),
        QuantSpec(bits=4, signed=False): (0, 15),
        QuantSpec(bits=4, narrow_range=True): (-7, 7),
        QuantSpec(max_magnitude=64): (-64, 64),
    }
    assert {spec: (spec.qmin, spec.qmax) for spec in bounds} == bounds


@pytest.mark.parametrize(("spec", "low", "high", "words"), [
    (plain(max_magnitude=64), -64, 64, "int8 in -64..64 symmetric per tensor"),
    (plain(narrow_range=True, max_magnitude=64), -64, 64, "int8 in -64..64 symmetric per tensor"),
    (plain(bits=7, max_magnitude=64), -64, 63, "int7 in -64..63 symmetric per tensor"),
    (plain(bits=7, narrow_range=True, max_magnitude=64), -63, 63, "int7 narrow symmetric per tensor"),
    (plain(bits=4, max_magnitude=64), -8, 7, "int4 symmetric per tensor"),
    (plain(signed=False, max_magnitude=127), 0, 127, "uint8 in 0..127 symmetric per tensor"),
    (plain(max_magnitude=1), -1, 1, "int8 in -1..1 symmetric per tensor"),
])  # fmt: skip
def test_a_largest_magnitude_narrows_the_grid(spec, low, high, words):
    assert (spec.qmin, spec.qmax, str(spec)) == (low, high, words)


@pytest.mark.parametrize(("wrong", "fact"), [
    *(
        ({"bits": bits}, f"bits must be a whole number{limits}, got {bits!r}")
        for bits, limits in ((0, " from 1 to 16"), (17, " from 1 to 16"), (8.0, ""), (True, ""), ("8", ""))
    ),
    # Point 56: the library checks types as the YAML does.
    ({"signed": "no"}, "signed must be true or false, got 'no'"),
    ({"symmetric": 1}, "symmetric must be true or false, got 1"),
    ({"narrow_range": "yes"}, "narrow_range must be true or false, got 'yes'"),
    ({"rule": 4}, "rule must be text, got 4"),
    ({"ewgs_delta": True}, "ewgs_delta must be a number or None, got True"),
    ({"group_size": "8"}, "group_size must be a whole number or None, got '8'"),
    *(({"percentile": wrong}, f"percentile .* got {wrong!r}") for wrong in (50, 100.1, float("nan"), "99")),
    *(({"max_magnitude": wrong}, f"max_magnitude .* got {wrong!r}") for wrong in (0, 64.0, True)),
    ({"granularity": "group"}, "group_size of at least 1, got None"),
    ({"granularity": "channel", "group_size": 8}, "group_size=8 has no effect with granularity='channel'"),
    ({"ewgs_delta": -0.1}, "ewgs_delta .* got -0.1"),
    ({"ewgs": "none", "ewgs_delta": 0.1}, "ewgs_delta=0.1 has no effect with ewgs='none'"),
    ({"options": 3}, "options must be a mapping, got 3"),
    ({"granularity": "row"}, "granularity must be one of tensor, channel, group, got 'row'"),
    ({"init": "max"}, "init must be one of minmax, percentile, mse, lsq, got 'max'"),
    ({"grad_scale": 1.0}, "grad_scale must be one of sample, batch, none, relative, got 1.0"),
    ({"signed": False, "narrow_range": True}, "narrow_range=True needs signed=True"),
])  # fmt: skip
def test_a_wrong_spec_is_refused(wrong, fact):
    with pytest.raises(ValueError, match=f"^QuantSpec: .*{fact}"):
        QuantSpec(**wrong)


GRIDS = {
    "int8": plain(bits=8),
    "int4 narrow": plain(bits=4, narrow_range=True),
    "int2": plain(bits=2),
    "uint4 symmetric": plain(bits=4, signed=False),
    "uint8 affine": plain(bits=8, signed=False, symmetric=False),
    "int4 affine": plain(bits=4, symmetric=False),
}
every_grid = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())


def rows() -> Tensor:
    """Rows of 400 values: Gaussian, skewed, positive only, negative only, one outlier, constants, all zero, tiny."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(10, 400, generator=generator)
    normal[1] = normal[1].exp() - 0.5
    normal[2] = normal[2].abs()
    normal[3] = -normal[3].abs()
    normal[4, 7] = 60.0
    normal[5] = 2.5
    normal[6] = -2.5
    normal[7] = 0.0
    normal[8] *= 1e-6
    normal[9] = torch.where(normal[9] > 1.5, normal[9] * 20, normal[9])
    return normal


def with_init(grid: QuantSpec, init: str, percentile: float = 99.99) -> QuantSpec:
    return dataclasses.replace(grid, init=init, percentile=percentile)


@every_grid
def test_minmax_is_the_extremes_with_zero_inside(grid):
    low, high = initial_range(rows(), with_init(grid, "minmax"))
    for row, found in zip(rows().double().numpy(), zip(low.tolist(), high.tolist(), strict=True), strict=True):
        assert found == reference.minmax(row)


@pytest.mark.parametrize("percent", ["99.99", "99.9", "99.5", "99", "90", "100", "50.5"])
@pytest.mark.parametrize("count", [1, 2, 7, 100, 400, 1000])
def test_percentile_is_the_nearest_rank_at_either_end(percent, count):
    values = rows().reshape(4, 1000)[:, :count]
    low, high = initial_range(values, plain(init="percentile", percentile=float(percent)))
    for row, found in zip(values.double().numpy(), zip(low.tolist(), high.tolist(), strict=True), strict=True):
        assert found == reference.percentile(row, percent)


@every_grid
def test_mse_is_the_argmin_over_the_documented_candidates(grid):
    low, high = initial_range(rows(), with_init(grid, "mse"))
    shares = []
    for row, found in zip(rows().double().numpy(), zip(low.tolist(), high.tolist(), strict=True), strict=True):
        errors = reference.squared_errors(row, grid.qmin, grid.qmax, grid.symmetric)
        extremes = reference.minmax(row)
        if extremes == (0.0, 0.0):
            assert found == extremes
            continue
        share = (found[1] - found[0]) / (extremes[1] - extremes[0])
        k = round(share * 80)
        assert found == pytest.approx((extremes[0] * k / 80, extremes[1] * k / 80), rel=1e-6)
        # The candidates' errors in float32 differ in the last digits: near-equal ones may change places.
        assert errors[k - 1] <= min(errors) * (1 + 1e-4) + 1e-12
        shares.append(k)
    # Tails are cut where the grid is coarse (at 8 bits 400 values do not pay for it), exact rows are not.
    assert max(shares) == 80 and (grid.bits == 8 or min(shares) < 75)


@every_grid
def test_lsq_gives_the_papers_scale(grid):
    spec = with_init(grid, "lsq")
    scale, _ = scale_and_zero_point(*initial_range(rows(), spec), spec)
    for i, row in enumerate(rows().double().numpy()):
        if row.any():
            expected = reference.lsq_scale(row, spec.qmax)
            assert scale[i].item() == pytest.approx(expected, rel=1e-5)
    assert scale[7].item() == 1.0


@every_grid
@pytest.mark.parametrize("init", ["minmax", "percentile", "mse", "lsq"])
def test_every_range_holds_zero_and_makes_a_usable_grid(grid, init):
    spec = with_init(grid, init)
    for values in (rows(), rows()[:, :1], torch.zeros(3, 1), torch.tensor([[1e-45], [1e30], [-1e30]])):
        low, high = initial_range(values, spec)
        assert low.shape == high.shape == (len(values),) and low.dtype == high.dtype == torch.float32
        assert (low <= 0).all() and (high >= 0).all()
        scale, zero = scale_and_zero_point(low, high, spec)
        assert (scale > 0).all() and scale.isfinite().all()
        assert torch.equal(zero, zero.round().clamp(spec.qmin, spec.qmax))
        assert not spec.symmetric or not zero.any()


@every_grid
def test_scale_and_zero_point_equal_the_formula(grid):
    lows, highs = [-3.0, 0.0, -0.2, -5.0, 0.0, -1e-3], [1.0, 2.0, 7.7, 0.0, 0.0, 1e3]
    scale, zero = scale_and_zero_point(torch.tensor(lows), torch.tensor(highs), grid)
    for i, (low, high) in enumerate(zip(lows, highs, strict=True)):
        expected = reference.grid_of(low, high, grid.qmin, grid.qmax, grid.symmetric)
        assert (scale[i].item(), zero[i].item()) == (pytest.approx(expected[0], rel=1e-6), expected[1])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("narrow", [False, True])
def test_the_largest_weight_of_a_minmax_channel_is_not_masked(bits, narrow):
    """Division in float32 must not push the largest weight over the bound, where the mask would stop its gradient."""
    spec = plain(bits=bits, narrow_range=narrow, granularity="channel")
    weight = torch.randn(4096, 27, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scale, _ = scale_and_zero_point(*initial_range(weight, spec), spec)
    lsq_quantize(weight, scale[:, None], spec.qmin, spec.qmax).sum().backward()
    masked = (weight.grad == 0).any(1)
    assert masked.sum().item() == 0, f"{masked.sum().item()} of 4096 channels have a masked weight"


@every_grid
@pytest.mark.parametrize("init", ["minmax", "percentile", "mse", "lsq"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_nan_and_infinity_are_refused(grid, init, bad):
    values = rows().double()
    values[3, 5] = bad
    with pytest.raises(ValueError) as refusal:
        initial_range(values, with_init(grid, init))
    assert str(refusal.value) == "initial_range: the values hold NaN or infinity"


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError) as refusal:
        initial_range(torch.zeros(shape), plain())
    assert str(refusal.value) == f"initial_range: values must have shape (groups, elements >= 1), got {shape}"


def test_a_range_carries_no_gradient_and_leaves_the_values_alone():
    values = rows().requires_grad_()
    for init in ("minmax", "percentile", "mse", "lsq"):
        low, high = initial_range(values, plain(init=init))
        assert not low.requires_grad and not high.requires_grad
    assert torch.equal(values.detach(), rows())
