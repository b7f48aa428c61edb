"""Small models that train on global batches, in one process or on many ranks: each rank takes its share of a batch."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import qat

BATCH, CLASSES, WORDS = 16, 4, 50

INTEGERS = {getattr(onnx.TensorProto, name) for name in ("INT4", "UINT4", "INT8", "UINT8", "INT32")}

FEW_BITS = qat.QuantRecipe(weight={"bits": 4}, activation={"bits": 4, "grad_scale": "batch"})
LEARNED_BITS = qat.QuantRecipe(
    weight={"rule": "learned_bits", "options": {"cost": 2e4}},
    activation={"rule": "learned_bits", "options": {"cost": 2e4}, "signed": True, "symmetric": True},
)


class Block(nn.Module):
    """What a vision transformer repeats."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.gelu, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block, self.head = nn.Conv2d(3, 16, 4, stride=4), Block(), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(self.table(x).mean(1))))


def cnn() -> nn.Module:
    first = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    second = [nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], qat.QuantRecipe]] = {
    "cnn": (cnn, FEW_BITS),
    "vit": (ViT, FEW_BITS),
    "embedding": (Words, FEW_BITS),
    "learned bits": (cnn, LEARNED_BITS),
}


def batch(name: str, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    if name == "embedding":
        return torch.randint(WORDS, (BATCH, 6), generator=generator), labels
    images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64)
    return (images + 0.3 * labels.view(-1, 1, 1, 1)).to(dtype), labels


def prepared(name: str, dtype: torch.dtype, rank: int = 0) -> nn.Module:
    """A new prepared model, the same in every process; its BatchNorms use the statistics of all ranks."""
    torch.manual_seed(0)
    build, recipe = MODELS[name]
    net = build().to(dtype)
    norms = sum(isinstance(each, nn.BatchNorm2d) for each in net.modules())
    if norms:
        count = dist.get_world_size() if dist.is_initialized() else 1
        qat.reestimate_batch_norm(net, [batch(name, step, dtype)[0] for step in range(90 + rank, 98, count)])
    model = qat.prepare(net.eval(), recipe, batch(name, 99, dtype)[0][:2]).to(dtype)
    assert qat.sync_batch_norm(model) == norms
    return model


def share(x: Tensor, rank: int, count: int) -> Tensor:
    """A rank's part of a batch."""
    return x.chunk(count)[rank]


def calibrate(model: nn.Module, name: str, dtype: torch.dtype, rank: int = 0, count: int = 1) -> None:
    """On two batches, of which each rank has its share."""
    qat.calibrate(model, [share(batch(name, step, dtype)[0], rank, count) for step in (97, 98)])


def optimizer_of(model: nn.Module, kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    # A scale that rests on its floor takes a rank's gradient or leaves it, by its sign: slow enough to stay above.
    return kind(qat.parameter_groups(model, lr=0.01, weight_decay=1e-3, quantizer_lr_factor=0.1), **options)


def train(
    parallel: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: range, rank: int = 0, count: int = 1
) -> Iterator[Tensor]:
    """Train on a rank's share of these global batches; yields each step's loss."""
    dtype = next(p.dtype for p in parallel.parameters() if p.is_floating_point())
    parallel.train()
    for step in steps:
        x, labels = (share(each, rank, count) for each in batch(name, step, dtype))
        loss = F.cross_entropy(parallel(x), labels) + qat.penalty(parallel)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def exported(state: dict[str, Tensor], name: str, folder: Path) -> dict[str, np.ndarray]:
    """The integers of the ONNX file of a new model with this state: weights, zero points and biases."""
    model = prepared(name, torch.float32)
    model.load_state_dict(state)
    qat.export_onnx(model.eval(), folder / "model.onnx", batch(name, 99, torch.float32)[0])
    initializers = onnx.load(folder / "model.onnx").graph.initializer
    tensors = {each.name: each for each in initializers if each.data_type in INTEGERS}
    return {key: onnx.numpy_helper.to_array(each).astype(np.int32) for key, each in tensors.items()}
