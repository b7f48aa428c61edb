"""Norms with an activation inside, as timm writes them: they fold as a norm and its activation would."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.preparation.report import LEFT_IN_FLOAT, noted
from tests.references.prepared_case import assert_computes_as, assert_takes_float_state, calls, draw


class NormAct(nn.BatchNorm2d):
    """Written like timm.layers.BatchNormAct2d."""

    def __init__(self, channels: int, act: nn.Module, scale: float = 1.0) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected 4D input")
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        x = F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps * self.scale)
        return self.act(self.drop(x))


def net(act: nn.Module, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, bias=False), NormAct(4, act, scale), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5)).eval()


@pytest.mark.parametrize("act", [nn.ReLU(inplace=True), nn.SiLU(), nn.PReLU(4), nn.Identity()])
def test_a_norm_with_an_activation_folds_and_keeps_its_names(act: nn.Module) -> None:
    x = draw(4, 3, 8, 8)
    float_model = net(act)
    model = qat.prepare(float_model, example_inputs=x)
    assert_computes_as(float_model, model, x)  # outputs, gradients and running statistics, in both modes
    assert_takes_float_state(model, float_model.state_dict())
    left = noted(model, LEFT_IN_FLOAT)
    assert "(the model)" not in left and not any("norm" in reason.lower() for reason in left.values())
    assert "1" not in calls(model) and "1.act" in calls(model)  # the convolution was given the norm
    assert type(float_model[1]) is NormAct


def test_it_trains_and_exports_as_one_file(tmp_path: object) -> None:
    x = draw(4, 3, 8, 8)
    model = qat.prepare(net(nn.ReLU()), example_inputs=x)
    qat.calibrate(model, [x])
    before = model.get_submodule("1").running_mean.clone()
    model.train()(x).square().mean().backward()
    assert not torch.equal(model.get_submodule("1").running_mean, before)
    path = f"{tmp_path}/norms.onnx"
    qat.export_onnx(model.eval(), path, x)
    assert qat.verify_onnx(path, model, [x]).agreement == 1.0


def test_a_norm_that_computes_something_else_stays_in_parts() -> None:
    x = draw(4, 3, 8, 8)
    float_model = net(nn.ReLU(), scale=100.0)
    model = qat.prepare(float_model, example_inputs=x)
    assert "in evaluation only" in noted(model, LEFT_IN_FLOAT)["(the model)"]
    assert_computes_as(float_model, model, x)


def test_two_uses_of_one_norm_compute_as_the_float_model() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), NormAct(3, nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(self.norm(self.conv(x))))

    torch.manual_seed(0)
    float_model, x = Twice().eval(), draw(4, 3, 8, 8)
    assert_computes_as(float_model, qat.prepare(float_model, example_inputs=x), x)
