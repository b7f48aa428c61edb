"""torch.ao's QAT of ResNet-20 for the accuracy table: FX graph mode, with our data, augmentation, epochs and rates.

    python -m benchmarks.accuracy_torch_ao --bits 4 --epochs 6 --data FILE.npz --weights FILE.safetensors --run FOLDER

Every weight per channel and every activation per tensor with FusedMovingAvgObsFakeQuantize, the first and the last
layer at 8 bits. Evaluated with the observers off, on the fake-quantized model: torch.ao converts no 4-bit layer.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    disable_observer,
    enable_observer,
)
from torch.ao.quantization.quantize_fx import prepare_qat_fx

from benchmarks.accuracy_rows import PLAIN_RATES
from benchmarks.cifar_resnet import resnet20
from qat.training.config.file import load_config
from qat.training.data.loaders import Data, Loader, load_data
from qat.training.run.report import processor_name

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def qconfig(bits: int) -> QConfig:
    """Unsigned activations and symmetric weights on so many bits."""
    activation = FusedMovingAvgObsFakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=2**bits - 1, dtype=torch.quint8
    )
    weight = FusedMovingAvgObsFakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver, quant_min=-(2 ** (bits - 1)), quant_max=2 ** (bits - 1) - 1,
        dtype=torch.qint8, qscheme=torch.per_channel_symmetric,
    )  # fmt: skip
    return QConfig(activation=activation, weight=weight)


def prepared(weights: Path, bits: int) -> nn.Module:
    """ResNet-20 with torch.ao's fake quantization."""
    model = resnet20()
    model.load_state_dict(load_file(weights))
    ends = qconfig(8)
    mapping = QConfigMapping().set_global(qconfig(bits)).set_module_name("conv1", ends).set_module_name("linear", ends)
    found = prepare_qat_fx(model.train(), mapping, (torch.zeros(1, 3, 32, 32),))
    assert isinstance(found, nn.Module)
    return found.to(memory_format=torch.channels_last)


def answers(model: nn.Module, loader: Loader) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and labels; the ranges stay, which torch.ao's observers would move in eval mode too."""
    model.eval().apply(disable_observer)
    with torch.no_grad():
        pairs = [(model(images).argmax(1), labels) for images, labels in loader]
    return tuple(torch.cat(each).numpy() for each in zip(*pairs, strict=True))  # type: ignore[return-value]


def train_epoch(model: nn.Module, data: Data, optimizer: Any, schedule: Any, epoch: int) -> float:
    """One epoch; returns its mean loss."""
    data.train.set_epoch(epoch)
    model.train().apply(enable_observer)
    losses: list[Tensor] = []
    for images, labels in data.train:
        loss = F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="use so many training images, to try the script")
    for name in ("data", "weights", "run"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(given.seed)
    limit = [f"data.limit_train={given.limit}"] if given.limit else []
    config = load_config("resnet20_cifar10_w4a4", [f"data.root={given.data}", *limit], CONFIGS)
    data = load_data(config.data, given.seed, torch.device("cpu"), channels_last=True)
    floating = resnet20()
    floating.load_state_dict(load_file(given.weights))
    floats, truth = answers(floating, data.val)
    model = prepared(given.weights, given.bits)
    optimizer = torch.optim.SGD(model.parameters(), lr=PLAIN_RATES[given.bits], momentum=0.9, nesterov=True,
                                weight_decay=1e-4)  # fmt: skip
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs * len(data.train))
    given.run.mkdir(parents=True, exist_ok=True)
    last, first, loss = given.run / "last.pt", 0, float("nan")
    if last.exists():
        saved = torch.load(last, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first, loss = saved["epoch"], saved["loss"]
    for epoch in range(first, given.epochs):
        loss = train_epoch(model, data, optimizer, schedule, epoch)
        found, _ = answers(model, data.val)
        print(f"epoch {epoch + 1}: loss {loss:.3f}, top1 {100 * (found == truth).mean():.2f} %", flush=True)
        states = {key: each.state_dict() for key, each in
                  (("model", model), ("optimizer", optimizer), ("schedule", schedule))}  # fmt: skip
        torch.save({**states, "epoch": epoch + 1, "loss": loss}, last)
    found, _ = answers(model, data.val)
    difference = (found == truth).astype(float) - (floats == truth).astype(float)
    summary = {
        "float": {"top1": 100 * float((floats == truth).mean())},
        "qat": {"top1": 100 * float((found == truth).mean())},
        "train_loss": loss,
        "difference": 100 * float(difference.mean()),
        "standard_error": 100 * float(difference.std() / np.sqrt(len(truth))),
        "seconds": time.perf_counter() - started,
        "machine": {"processor": processor_name(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    (given.run / "summary.json").write_text(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
