"""Sentences of docs/ that promise something, tried: each test has the sentence as its docstring."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.functional import ewgs_gradient
from qat.quantizer import create_quantizer, registered_quantizers
from qat.spec import default_spec

SIGNED, AFFINE = {"signed": True, "symmetric": True}, {"signed": False, "symmetric": False}
FOLLOWING = {"dorefa": {}, "binary": {"bits": 1}, "ternary": {"bits": 2}}


def images() -> Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def calibrated(layers: list[nn.Module], recipe: qat.QuantRecipe | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*layers).eval()
    model(images())
    prepared = qat.prepare(model, recipe, example_inputs=images())
    qat.calibrate(prepared, [images()])
    return prepared.eval()


def two_convolutions(between: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
    return [first, between(), second, between(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]


def test_what_learns_nothing() -> None:
    """rules.md: nothing is learned by `minmax`, `ema`, `dorefa`, `ternary` and the MX formats; `binary` learns the
    scale of activations only."""
    learns: dict[str, set[str]] = {}
    for rule in ("minmax", "ema", "dorefa", "ternary", "binary", "mxfp4", "mxfp6", "mxfp8", "mxint8"):
        bits = {"ternary": 2, "binary": 1, "mxfp4": 4, "mxfp6": 6}.get(rule, 8)
        for role in ("weight", "activation") if rule != "ternary" else ("weight",):
            grid = {} if rule in ("dorefa", "minmax", "ema") else SIGNED
            quantizer = create_quantizer(default_spec(role).changed({"rule": rule, "bits": bits, **grid}), role)
            learns.setdefault(rule, set()).update(f"{role} {name}" for name, _ in quantizer.named_parameters())
    assert learns.keys() < set(registered_quantizers())
    assert {rule: names for rule, names in learns.items() if names} == {"binary": {"activation scale"}}


@pytest.mark.parametrize("rule", ["lsq", "dsq", "power_of_two", "minmax", "ema", *FOLLOWING])
def test_frozen_ranges(rule: str) -> None:
    """rules.md: `qat.freeze_scales` holds learned ranges, `minmax` and `ema`; what `dorefa`, `binary`, `ternary` take
    from the tensor itself goes on following it."""
    layer = qat.QuantConv2d(3, 4, 3, weight_spec=qat.QuantSpec(rule=rule, **FOLLOWING.get(rule, {})))
    qat.calibrate(layer, [images()])
    qat.freeze_scales(layer)
    before = layer.weight_quantizer.grid(layer.weight)[0].clone()
    with torch.no_grad():
        layer.weight *= 1.5
    layer.train()(images())
    assert torch.equal(before, layer.weight_quantizer.grid(layer.weight)[0]) is (rule not in FOLLOWING)


@pytest.mark.parametrize(("place", "called"), [("weight", "prepare: 0"), ("input", "calibrate")])
def test_scales_beyond_reach(place: str, called: str) -> None:
    """rules.md: a learned scale acts as at most 1e18, beyond which `prepare` and `calibrate` refuse."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), images()
    if place == "weight":
        model[0].weight.data[0] *= 1e22
    with pytest.raises(ValueError, match="1e18") as raised:
        qat.calibrate(qat.prepare(model.eval(), example_inputs=x), [x * (1e22 if place == "input" else 1)])
    assert str(raised.value).startswith(called)


@pytest.mark.parametrize(
    ("layers", "activation", "count"),
    [
        (two_convolutions(), AFFINE, 0),
        (two_convolutions(), SIGNED, 2),
        (two_convolutions(nn.Identity), SIGNED, 0),
        ([nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)], AFFINE, 1),
        ([nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)], AFFINE, 1),
        ([nn.ConvTranspose2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)], AFFINE, 1),
    ],
    ids=["plain", "a ReLU on signed grids", "signed grids", "the answer", "padding", "transposed"],
)
def test_convolutions_in_float(layers: list[nn.Module], activation: Any, count: int, tmp_path: Path) -> None:
    """training_loop.md: `float_convolutions` counts a convolution whose result is the model's answer, a transposed one,
    one with another `padding_mode` than zeros, one whose ReLU has a result on a signed symmetric grid."""
    model = calibrated(layers, qat.QuantRecipe(activation=activation))
    qat.export_onnx(model, tmp_path / "model.onnx", images()[:2])
    found = qat.verify_onnx(tmp_path / "model.onnx", model, [images()])
    assert (found.float_convolutions, found.agreement) == (count, 1.0)


def test_ewgs_in_forward_mode() -> None:
    """rules.md: EWGS depends on the sign of the incoming gradient, which forward mode (`jvp`) does not have: there the
    tangent passes unchanged."""
    x = images()
    _, tangent = torch.func.jvp(lambda each: ewgs_gradient(each, torch.tensor(0.3), 0.1), (x,), (x,))
    assert torch.equal(tangent, x)


def test_a_hook_on_a_block_of_the_float_model(caplog: pytest.LogCaptureFixture) -> None:
    """troubleshooting.md: a hook on a block, set before `prepare`: the graph holds what it computed, and has no call of
    the block."""
    seen: list[int] = []
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Conv2d(4, 4, 3)).eval()
    model[0].register_forward_hook(lambda *_: seen.append(1))
    model[1].register_forward_hook(lambda *_: None)
    prepared = qat.prepare(model, example_inputs=images())
    assert caplog.messages == ["prepare: the graph holds what hooks of '0' computed, and they do not run again"]
    count = len(seen)
    qat.calibrate(prepared, [images()])
    prepared(images())
    assert len(seen) == count
