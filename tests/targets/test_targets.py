"""Target profiles: consistent data, the published facts; and max_magnitude, which every rule respects or refuses."""

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import qat
from qat.export.checks import keeps_to_its_grid
from qat.layers import QuantLayer
from qat.quantizer import create_quantizer, registered_quantizers
from qat.spec import QuantSpec
from qat.targets import PROFILES, profile_of
from tests.references.rule_specs import plain

EACH = pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
SHIPPED = ["onnxruntime", "onnxruntime_x86", "tensorrt", "openvino", "qnnpack", "integer_only", "litert"]
TENSORS = ("weight", "activation")


def test_every_target_has_its_profile() -> None:
    assert list(PROFILES) == SHIPPED == [profile.name for profile in PROFILES.values()]
    assert all(profile_of(name) is profile for name, profile in PROFILES.items())
    with pytest.raises(ValueError) as refusal:
        profile_of("riscv")
    own = "import the module of one of your own first (in a config: imports)"  # point 34
    assert str(refusal.value) == f"unknown target 'riscv'; registered: {', '.join(SHIPPED)}; {own}"


@EACH
def test_every_choice_has_a_reason_and_a_source(profile) -> None:
    described = {"shared_grids", "float_operations"}
    described |= {f"{tensor}{limit}" for tensor in TENSORS for limit in ("", ".most_bits", ".granularities")}
    described |= {field for field in ("quantizes_outputs", "float_biases") if getattr(profile, field)}
    for tensor in TENSORS:
        limits = getattr(profile, f"{tensor}_limits")
        described |= {f"{tensor}.{kind}" for kind in ("signed", "symmetric") if len(getattr(limits, kind)) == 1}
    assert described <= set(profile.reasons)
    for key, reason in profile.reasons.items():
        tensor, _, limit = key.partition(".")
        owner = getattr(profile, f"{tensor}_limits") if limit else profile
        assert hasattr(owner, limit or key), key
        assert reason.text and not reason.text.endswith(".") and "\n" not in reason.text
        assert not reason.source or re.match(r"https://\S+$|measured: |README\.md$", reason.source), key


@EACH
def test_every_grid_is_run_or_refused_in_one_clause(profile) -> None:
    """For all grids the answer follows the limits, and the grid that the message proposes runs."""
    for tensor in TENSORS:
        limits = getattr(profile, f"{tensor}_limits")
        for spec in all_grids():
            runs = (
                spec.bits <= limits.most_bits
                and spec.qmin >= limits.lowest
                and spec.signed in limits.signed
                and spec.symmetric in limits.symmetric
                and spec.granularity in limits.granularities
            )
            refusal = profile.refusal(tensor, spec)
            assert (refusal is None) == runs, (spec, refusal)
            steps = 0
            while refusal is not None:
                assert profile.name in refusal and tensor in refusal and "\n" not in refusal
                spec, steps = repaired(spec, refusal), steps + 1
                refusal = profile.refusal(tensor, spec)
                assert steps < 6


def all_grids() -> Iterator[QuantSpec]:
    both, sizes = (True, False), {"tensor": None, "channel": None, "group": 4}
    for bits, signed, symmetric, narrow in itertools.product((2, 4, 8, 9, 16), both, both, both):
        if signed or not narrow:
            for granularity, size in sizes.items():
                grid = {"signed": signed, "symmetric": symmetric, "narrow_range": narrow}
                yield plain(bits=bits, **grid, granularity=granularity, group_size=size)


def repaired(spec: QuantSpec, refusal: str) -> QuantSpec:
    """The spec with the changes that a refusal proposes."""
    if found := re.search(r"use (signed|symmetric|narrow_range)=(True|False)$", refusal):
        return replace(spec, **{found[1]: found[2] == "True"})
    if refusal.endswith("use signed=False and narrow_range=False"):
        return replace(spec, signed=False, narrow_range=False)
    if found := re.search(r"use max_magnitude=(\d+)$", refusal):
        return replace(spec, max_magnitude=int(found[1]))
    if found := re.search(r"use at most (\d+) bits$", refusal):
        return replace(spec, bits=int(found[1]))
    found = re.search(r"; use '(\w+)'", refusal)
    assert found, refusal
    return replace(spec, granularity=found[1], group_size=None)


def test_the_published_facts() -> None:
    tensorrt, openvino = PROFILES["tensorrt"], PROFILES["openvino"]
    assert (tensorrt.activation.qmin, tensorrt.activation.qmax, tensorrt.activation.symmetric) == (-128, 127, True)
    assert [name for name, profile in PROFILES.items() if profile.float_biases] == ["tensorrt"]
    assert tensorrt.activation_limits.signed == (True,) and tensorrt.activation_limits.symmetric == (True,)
    assert (openvino.activation.qmin, openvino.activation.qmax, openvino.activation.symmetric) == (0, 255, False)
    assert (openvino.weight.qmin, openvino.weight.qmax) == (-127, 127)
    mobile = PROFILES["qnnpack"]
    assert (mobile.activation.qmin, mobile.activation.qmax) == (0, 255)
    assert mobile.refusal("activation", QuantSpec(signed=True)) is None  # XNNPACK's int8
    integer = PROFILES["integer_only"]
    assert (integer.activation.qmin, integer.activation.qmax, integer.activation.symmetric) == (-128, 127, False)
    assert integer.quantizes_outputs and not integer.float_operations
    assert [name for name, profile in PROFILES.items() if profile.quantizes_outputs] == ["integer_only", "litert"]
    assert {name for name, profile in PROFILES.items() if "cat" in profile.shared_grids} == {
        "tensorrt", "openvino", "qnnpack", "integer_only", "litert",
    }  # fmt: skip
    litert = PROFILES["litert"]
    assert litert.fixed_grids["sigmoid"] == litert.fixed_grids["softmax"] == (1 / 256, -128)
    assert litert.fixed_grids["tanh"] == (1 / 128, 0) and not integer.fixed_grids
    assert all("max_pool" in profile.shared_grids for profile in PROFILES.values())


X86 = PROFILES["onnxruntime_x86"]


def spec_of(rule: str) -> QuantSpec | None:
    """A grid of this rule that max_magnitude=5 narrows; None if the rule's grid is narrower."""
    for bits, signed, symmetric in itertools.product((8, 4, 2, 1), (True, False), (True, False)):
        spec = plain(bits=bits, signed=signed, symmetric=symmetric, rule=rule)
        with contextlib.suppress(ValueError):
            create_quantizer(spec, "weight")
            return spec if bits > 2 else None
    return None


@pytest.mark.parametrize("rule", registered_quantizers())
def test_a_rule_keeps_to_the_magnitude_or_refuses_it(rule: str) -> None:
    spec = spec_of(rule)
    if spec is None:  # one or two bits, or activations only, which refuse below
        return
    limited = replace(spec, max_magnitude=5)
    try:
        quantizer = create_quantizer(limited, "weight")
    except ValueError as error:
        assert f"rule {rule!r} " in str(error) and "max_magnitude=5" in str(error)
        return
    x = torch.linspace(-3, 3, 200).reshape(10, 20)
    quantizer.fit(x.reshape(1, -1))
    quantizer.eval()
    low, high = quantizer.bounds()
    assert max(-low, high) == 5
    codes = quantizer.codes(x)
    assert codes.abs().max() <= 5 and keeps_to_its_grid(quantizer, x)


def test_pact_refuses_it_for_activations() -> None:
    with pytest.raises(ValueError, match=r"^rule 'pact' has the integers of its 8 bits and cannot keep to max_magnitu"):
        create_quantizer(QuantSpec(signed=False, rule="pact", max_magnitude=100), "activation")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def largest_integers(model: nn.Module) -> dict[str, float]:
    return {
        name: float(layer.weight_quantizer.codes(layer.weight).detach().abs().max())
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLayer)
    }


def test_as_a_target_and_as_an_override() -> None:
    x = torch.randn(8, 3, 8, 8)
    for recipe, expected in (
        (qat.QuantRecipe(target="onnxruntime_x86"), {"0": 64.0, "4": 64.0}),
        (qat.QuantRecipe(overrides={"type:Linear": {"weight": {"max_magnitude": 64}}}), {"0": 127.0, "4": 64.0}),
        (qat.QuantRecipe(target="onnxruntime_x86", last_bits=4), {"0": 64.0, "4": 7.0}),
    ):
        model = qat.prepare(net(), recipe, x)
        qat.calibrate(model, [x])
        assert largest_integers(model) == expected
        table = qat.summary(model)
        assert table.count("int8 in -64..64 symmetric per channel") == list(expected.values()).count(64.0)


def test_the_largest_sum_of_two_products_fits_16_bits() -> None:
    highest = X86.activation.qmax
    assert highest * 2 * X86.weight.qmax < 2**15 <= highest * 2 * (X86.weight.qmax + 1)
    assert -highest * 2 * X86.weight.qmin < 2**15
