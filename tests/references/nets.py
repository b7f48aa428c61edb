"""The models that tests of the engine share."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.references.prepared_case import Plain


class Block(nn.Module):
    """A residual block with a downsampling path, a pool and a classifier."""

    def __init__(self, act: Callable[[], nn.Module] = nn.ReLU, **norm: object) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32, **norm)  # type: ignore[arg-type]
        self.conv2, self.bn2 = nn.Conv2d(32, 32, 3, padding=1, groups=4, bias=False), nn.BatchNorm2d(32, **norm)  # type: ignore[arg-type]
        self.conv3 = nn.Conv2d(32, 32, 1)
        self.act, self.pool, self.head = act(), nn.MaxPool2d(2), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.bn1(self.conv1(x))))
        y = self.act(self.bn2(self.conv2(x)))
        y = F.relu(self.conv3(y) + x)
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


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


class Deep(nn.Module):
    """BatchNorm and ReLU between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)
        self.norm_a, self.norm_b = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.norm_b(self.b(F.relu(self.norm_a(self.a(x)))))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Patches, one block as ViT has it, a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.norm, self.other = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.mlp(self.other(x))).mean(1))  # type: ignore[no-any-return]


def residual() -> nn.Module:
    """A sum whose result the next layer reads as integers."""
    convs = {"a": nn.Conv2d(3, 8, 3, padding=1), "b": nn.Conv2d(8, 8, 3, padding=1), "c": nn.Conv2d(8, 4, 3)}

    def forward(self: Any, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return self.c(F.relu(self.norm(self.b(y)) + y))  # type: ignore[no-any-return]

    return Plain(forward, norm=nn.BatchNorm2d(8), **convs)


def between(function: Callable[[Any, Tensor], Any], width: int = 16) -> nn.Module:
    """A ReLU behind a convolution, something, another convolution."""
    layers = {"a": nn.Conv2d(3, width, 3), "b": nn.Conv2d(width, 5, 3)}
    return Plain(lambda self, x: function(self.b, F.relu(self.a(x))), **layers)


def scores(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """Of rows: two projections, their product, something, another product."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), self.b(x)
        return self.last(function(a @ b.transpose(-2, -1)) @ b)  # type: ignore[no-any-return]

    return Plain(forward, a=nn.Linear(16, 24), b=nn.Linear(16, 24), last=nn.Linear(24, 5))
