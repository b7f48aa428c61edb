"""A model with everything that the fused graph knows, and what one training step of it leaves behind."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat


class Everything(nn.Module):
    """What the fused graph knows: norms, clips, sums, a pool, a grouped convolution, curves, attention.

    No norm and no mean that torch itself computes in front of a quantizer: compiled code sums in another order, and a
    value next to a tie would fall on the other level.
    """

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 32, 3, padding=1, groups=4), nn.BatchNorm2d(32, affine=False)
        self.conv3, self.bn3 = nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32, momentum=momentum)  # type: ignore[arg-type]
        self.conv4, self.bn4 = nn.Conv2d(32, 32, 3, 2, padding=1), nn.BatchNorm2d(32, track_running_stats=False)
        self.short = nn.Conv2d(3, 32, 1)
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(0.0)
        self.hidden, self.head = nn.Linear(32, 24), nn.Linear(24, 5)
        self.query, self.key = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, image: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(image))))
        y = F.relu6(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(y)) + x)
        x = x + x
        x = F.hardtanh(self.bn4(self.conv4(x)), -1.0, 1.0)
        rows = F.gelu(x + self.short(image[:, :, ::4, ::4])).flatten(2).mT
        query, key = self.query(rows), F.silu(self.key(rows))
        rows = torch.softmax(query @ key.mT * 0.25, -1) @ rows
        x = self.drop(F.relu(self.hidden(rows[:, 0])))
        return self.head(x)  # type: ignore[no-any-return]


def images(count: int = 8, seed: int = 0, channels_last: bool = True) -> Tensor:
    x = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return x.to(memory_format=torch.channels_last) if channels_last else x


def prepared(x: Tensor, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    model = qat.prepare(Everything(momentum), example_inputs=x)
    qat.calibrate(model, [x])
    return model.train()


def differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """Relative, of everything there is; of a bias to its weight too, since in front of a norm its gradient cancels."""
    assert expected.keys() == found.keys()
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    return {
        name: float((value.double() - found[name].double()).norm())
        / max(norms[name], norms.get(f"{name.removesuffix('.bias')}.weight", 0.0) * name.endswith(".bias"), 1e-3)
        for name, value in expected.items()
    }


def assert_near(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Compiled code and formulas sum in another order; a scale's gradient is a sum of terms that cancel."""
    for name, error in differences(expected, found).items():
        assert error < (2e-3 if name.endswith("scale") else 1e-4), (name, error)


def step(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Output, gradients and buffers."""
    model.zero_grad()
    y = forward(x)
    y.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **gradients, **{f"{name} ": b.clone() for name, b in model.named_buffers()}}
