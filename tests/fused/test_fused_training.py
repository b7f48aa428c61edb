"""Trainings of some length on codes, next to the same in plain operations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.kernels import plain_formulas
from qat.kernels.cpu import compiler
from qat.training.config.schema import DataConfig
from qat.training.data.loaders import load_data

pytestmark = pytest.mark.slow

STEPS, RATE = 200, 0.1


class Net(nn.Module):
    """Three convolutions, a residual sum, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.body(x) + x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    """The first epochs of the bundled digits, in an order of this seed."""
    data = load_data(DataConfig(image_size=24, batch_size=48), seed, torch.device("cpu"), True)
    found: list[tuple[Tensor, Tensor]] = []
    epoch = 0
    while len(found) < STEPS:
        data.train.set_epoch(epoch)
        found += [(images, labels) for images, labels in data.train]
        epoch += 1
    return found[:STEPS]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """As train.py's: at the rate of the weights a scale may run away, in plain operations as on codes."""
    scales = [p for name, p in model.named_parameters() if name.endswith("scale")]
    others = [p for name, p in model.named_parameters() if not name.endswith("scale")]
    return torch.optim.SGD([{"params": others}, {"params": scales, "lr": 0.1 * RATE}], RATE, momentum=0.9)


def curve(model: nn.Module, given: list[tuple[Tensor, Tensor]], plain: bool) -> Tensor:
    model = copy.deepcopy(model)
    optimizer = optimizer_of(model)
    losses = []
    with plain_formulas() if plain else torch.enable_grad():
        for images, labels in given:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")
def test_the_loss_curve_of_200_steps_is_that_of_the_formulas_within_the_noise_of_seeds() -> None:
    curves: dict[bool, list[Tensor]] = {True: [], False: []}
    for seed in range(3):
        torch.manual_seed(seed)
        given = batches(seed)
        model = qat.prepare(Net().to(memory_format=torch.channels_last), example_inputs=given[0][0])
        qat.calibrate(model, [images for images, _ in given[:4]])
        for plain, found in curves.items():
            found.append(curve(model.train(), given, plain))
    formulas, fast = (torch.stack(curves[plain]).reshape(3, -1, 25).mean(2) for plain in (True, False))
    assert formulas[:, -1].max() < 0.6 * formulas[:, 0].min()  # it learns
    # Trainings part from each other after some steps whatever is different; the mean curves do not.
    noise = formulas.max(0).values - formulas.min(0).values
    assert ((fast.mean(0) - formulas.mean(0)).abs() <= noise + 0.02).all(), (fast.mean(0) - formulas.mean(0), noise)
