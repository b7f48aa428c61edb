"""Cross-layer equalization keeps the float model and evens ranges; and the steps of a run of train.py."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.post_training import CrossLayerEqualization
from qat.training.config.file import load_config
from qat.training.errors import UserError
from tests.post_training.test_reconstruction import shares
from tests.references.prepared_case import Plain
from tests.runs.finished_runs import SIZES, in_place, write_own

TENSOR = {"granularity": "tensor", "bits": 8}


def chain(middle: nn.Module | None = None, norm: bool = True) -> nn.Sequential:
    """Two pairs: a convolution and a depthwise one, that one and the last."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=not norm), nn.BatchNorm2d(6) if norm else nn.Identity(), middle or nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Dropout(), nn.Conv2d(6, 4, 1),
    )  # fmt: skip
    with torch.no_grad():
        if norm:
            model(images())
            model[1].weight.copy_(torch.tensor([1.0, -0.5, 2.0, 0.1, 3.0, 1.0]))  # type: ignore[operator]
            model[1].bias.normal_()  # type: ignore[operator]
        factor = torch.logspace(-1, 1, 6)  # channels that one layer makes large, and the next small again
        for scaled in (model[1] if norm else model[0]).parameters():
            scaled *= factor.view(-1, *[1] * (scaled.dim() - 1))
        model[3].weight /= factor.view(-1, 1, 1, 1)  # type: ignore[operator]
    return model.eval()


def images() -> Tensor:
    return torch.randn(64, 3, 9, 9, generator=torch.Generator().manual_seed(0))


def calibrated(float_model: nn.Module, steps: list[Any], weight: dict[str, Any]) -> Any:
    model = qat.prepare(float_model, qat.QuantRecipe(weight), images()[:2])
    qat.calibrate(model, images(), steps=steps)
    return model.eval()


def in_float(model: nn.Module) -> Tensor:
    with torch.no_grad(), qat.disable_fake_quant(model):
        out: Tensor = model(images())
    return out


def errors(float_model: nn.Module, weight: dict[str, Any]) -> list[float]:
    """The mean squared errors of the answers without the step and with it."""
    expected = float_model(images()).detach()
    models = [calibrated(float_model, steps, weight) for steps in ([], [CrossLayerEqualization()])]
    return [float((model(images()).detach() - expected).square().mean()) for model in models]


@pytest.mark.parametrize("norm", [True, False])
def test_the_float_model_stays_and_ranges_meet(norm: bool) -> None:
    float_model = chain(norm=norm)
    model = calibrated(float_model, [CrossLayerEqualization(rounds=50)], TENSOR)
    torch.testing.assert_close(in_float(model), float_model(images()).detach(), rtol=1e-3, atol=1e-3)
    first, second, last = (model.get_submodule(name) for name in ("0", "3", "6"))
    r1 = first.weight.abs().amax((1, 2, 3))
    r2, r3 = second.weight.abs().amax((1, 2, 3)), last.weight.abs().amax((0, 2, 3))
    torch.testing.assert_close(*((r1 / r1.max(), r2 / r2.max()) if norm else (r1, r2)), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(r2, r3, rtol=1e-3, atol=1e-4)


def test_it_saves_a_model_with_one_scale_for_a_weight() -> None:
    without, with_it = errors(chain(), TENSOR)
    assert with_it < 0.1 * without


def test_each_weight_in_front_of_a_batch_norm_has_channels_of_one_range() -> None:
    """Point 55: it stayed as it is, and the next one took its ranges over; per tensor that harmed."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    float_model = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        for place in (0, 3):
            layers[place].weight *= torch.logspace(-1, 0, 8).view(-1, 1, 1, 1)  # type: ignore[operator]
        for _ in range(30):
            float_model(images())
    four_bits = {"bits": 4, "granularity": "tensor"}
    evened = calibrated(float_model.eval(), [CrossLayerEqualization()], four_bits)
    torch.testing.assert_close(in_float(evened), float_model(images()).detach(), rtol=1e-4, atol=1e-4)
    for place in ("0", "3"):
        ranges = evened.get_submodule(place).weight.abs().amax((1, 2, 3))
        torch.testing.assert_close(ranges, ranges.max().expand(8))
    without, with_it = errors(float_model, four_bits)
    assert with_it < 0.5 * without


def test_an_activation_that_lets_no_factor_pass_keeps_a_pair_apart(caplog: pytest.LogCaptureFixture) -> None:
    float_model = chain(nn.ReLU6())
    with caplog.at_level(logging.INFO, "qat"):
        model = calibrated(float_model, [CrossLayerEqualization()], TENSOR)
    assert any("1 pairs of layers; 1 pairs have something between" in message for message in caplog.messages)
    torch.testing.assert_close(in_float(model), float_model(images()).detach(), rtol=1e-3, atol=1e-3)


def test_layers_with_another_reader_between_them_are_no_pair() -> None:
    layers = {"first": nn.Conv2d(3, 3, 1), "second": nn.Conv2d(3, 3, 1)}
    float_model = Plain(lambda self, x: (y := torch.relu(self.first(x))) + self.second(y), **layers).eval()
    model = calibrated(float_model, [CrossLayerEqualization()], TENSOR)
    assert torch.equal(model.first.weight, float_model.first.weight)


NETS = {
    "called twice, and a weight that is shared": shares(),
    # the channels of one are not those of the other
    "linear, convolution": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Conv1d(8, 8, 1)),
    "convolution, linear": nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Linear(8, 8)),
    "groups": nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU(), nn.Conv1d(8, 16, 3, groups=8, padding=1)),
    "transposed": nn.Sequential(nn.Conv1d(8, 8, 1), nn.ReLU(), nn.ConvTranspose1d(8, 8, 3, padding=1)),
}


@pytest.mark.parametrize("name", NETS)
def test_the_float_model_stays_whatever_follows_whatever(name: str) -> None:
    float_model, x = NETS[name].eval(), torch.randn(4, 8, 8)
    model = qat.prepare(float_model, None, x)
    qat.calibrate(model, x, steps=[CrossLayerEqualization()])
    with torch.no_grad(), qat.disable_fake_quant(model):
        torch.testing.assert_close(model.eval()(x), float_model(x))


def test_a_frozen_range_keeps_its_layers_as_they_are() -> None:
    float_model = chain(norm=False)
    model = qat.prepare(float_model, qat.QuantRecipe(TENSOR), images()[:2])
    qat.freeze_scales(model)
    qat.calibrate(model, images(), steps=[CrossLayerEqualization()])
    assert torch.equal(model.get_submodule("0").weight, float_model[0].weight)  # type: ignore[arg-type]


def test_a_dead_channel_does_not_blow_up_its_bias() -> None:
    float_model = chain(norm=False)
    with torch.no_grad():
        float_model[0].weight[2] *= 1e-12  # type: ignore[index, operator]
    model = calibrated(float_model, [CrossLayerEqualization()], TENSOR)
    assert model.get_submodule("0").bias.abs().max() < 100


def test_a_channel_that_is_all_bias_does_not_take_the_grid_of_the_others() -> None:
    """Weight decay makes such channels: a gain of almost 0, and a bias that is not."""
    float_model = chain()
    with torch.no_grad():
        float_model[1].weight[2], float_model[1].bias[2] = 1e-5, 3.0  # type: ignore[index, operator]
    without, with_it = errors(float_model, TENSOR)
    assert with_it < without


def test_all_ranges_are_found_anew_behind_it() -> None:
    model = calibrated(chain(), [], TENSOR)
    again = qat.prepare(chain(), qat.QuantRecipe(TENSOR), images()[:2])
    qat.calibrate(again, images(), steps=[CrossLayerEqualization()])
    qat.calibrate(model, images(), only_missing=True, steps=[CrossLayerEqualization()])
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_rounds_below_1_are_a_sentence() -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        CrossLayerEqualization(rounds=0)


FEW = ("quantization.weight.bits=2", "quantization.residual_bits=8", "qat.ema_decay=null", "qat.bn_reestimate=auto")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_own(tmp_path_factory.mktemp("steps"))


def test_a_run_takes_its_steps_and_exports_what_they_made(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = {}
    for name, steps in {
        "plain": "",
        "steps": "{name: cross_layer_equalization}, {name: brecq, iterations: 200}",
    }.items():
        given = (f"quantization.calibration_steps=[{steps}]", f"run_dir={name}")
        assert in_place(place, "--config", "own.yaml", *SIZES, *FEW, *given) == 0
        found[name] = json.loads((place / name / "summary.json").read_text())
    assert found["steps"]["calibrated"]["top1"] > found["plain"]["calibrated"]["top1"]
    assert found["steps"]["qat"]["top1"] == found["steps"]["calibrated"]["top1"]
    said = [message for message in caplog.messages if message.startswith("calibrate: ")]
    assert [each.split(":")[1].strip() for each in said] == ["CrossLayerEqualization", "BRECQ"]
    weights = [torch.load(place / name / "best.pt", weights_only=True)["model"]["0.weight"] for name in found]
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("{name: adaround, rounds: 3}", "adaround: unknown argument 'rounds'; valid: iterations"),
        ("{name: ada}", "calibration_steps"),
        ("{name: qdrop, drop: 2}", "calibration_steps"),
    ],
)
def test_what_a_step_does_not_take_is_a_sentence(place: Path, step: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(str(place / "own.yaml"), [f"quantization.calibration_steps=[{step}]"])
