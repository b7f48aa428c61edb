"""Target profiles: consistent data, the published facts, and models that run under each of them."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import qat
from qat.quantizer import Quantizer
from qat.spec import QuantSpec
from qat.targets import PROFILES, profile_of
from qat.training.config.schema import RunConfig
from qat.training.loop.preparation import build_recipe
from tests.references.rule_specs import plain

ROOT = Path(__file__).resolve().parents[2]
EACH = pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
SHIPPED = ["onnxruntime", "onnxruntime_x86", "tensorrt", "openvino", "qnnpack", "integer_only"]
TENSORS = ("weight", "activation")


def test_every_target_has_its_profile() -> None:
    assert list(PROFILES) == SHIPPED == [profile.name for profile in PROFILES.values()]
    assert all(profile_of(name) is profile for name, profile in PROFILES.items())
    with pytest.raises(ValueError) as refusal:
        profile_of("tflite")
    assert str(refusal.value) == f"unknown target 'tflite'; registered: {', '.join(SHIPPED)}"


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
    assert [name for name, profile in PROFILES.items() if profile.quantizes_outputs] == ["integer_only"]
    assert {name for name, profile in PROFILES.items() if "cat" in profile.shared_grids} == {
        "tensorrt", "openvino", "qnnpack", "integer_only",
    }  # fmt: skip
    assert all("max_pool" in profile.shared_grids for profile in PROFILES.values())


@EACH
def test_no_operation_is_both_in_float_and_on_a_shared_grid(profile) -> None:
    assert not profile.shared_grids & profile.float_operations
    assert not {"add", "matmul", "mul", "avg_pool", "cat", "max_pool"} & profile.float_operations


@EACH
def test_a_model_prepared_for_a_target_has_only_grids_that_it_runs(profile) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    )
    model = qat.prepare(net, qat.QuantRecipe(target=profile.name))
    x = torch.randn(16, 3, 8, 8)
    qat.calibrate(model, [x])
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    assert {quantizer.role for quantizer in quantizers} == set(TENSORS)
    for quantizer in quantizers:
        assert profile.refusal(quantizer.role, quantizer.spec) is None
        assert quantizer.spec == getattr(profile, quantizer.role)
    with torch.no_grad():
        error = (model.eval()(x) - net.eval()(x)).abs().max() / net(x).std()
    assert 0 < error < 0.1


def test_the_targets_page_is_true() -> None:
    page = (ROOT / "docs" / "targets.md").read_text()
    code, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    section, _ = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    names: dict[str, qat.QuantRecipe] = {}
    exec(compile(code, "docs/targets.md", "exec"), names)
    config = RunConfig.model_validate(yaml.safe_load(section))
    last = ("3", nn.Linear, "last")
    assert build_recipe(config.quantization).for_layer(*last) == names["recipe"].for_layer(*last)
    (sentence,) = re.findall(r"```\n(QuantRecipe: .*)\n```", page)
    with pytest.raises(ValueError) as refusal:
        qat.QuantRecipe(activation=QuantSpec(signed=False), target="tensorrt")
    assert str(refusal.value) == sentence
