"""What an epoch costs, data included: float, 8 to 2 bits, and distillation, in turns of a few steps in one process.

python -m benchmarks.epoch --data FILE.npz      # arrays of 32 x 32 images; keeps results/epoch.json
python -m benchmarks.document                   # writes the table into docs/speed.md
"""

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from benchmarks.cifar_resnet import resnet20
from benchmarks.speed_rows import facts_of_run
from benchmarks.speed_table import conditions_of
from qat.finetuning import Distillation
from qat.training.config.schema import AugmentConfig, DataConfig
from qat.training.data.loaders import load_data

OUT = Path(__file__).resolve().parent / "results" / "epoch.json"
BATCH, TURN, PARTS = 128, 10, 3
"""Images of a step; steps of a turn; parts of the epoch, whose ratios show how much they vary."""


def main() -> None:
    """An epoch of each, every one with a loader of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="an .npz file as data.name npz reads it")
    path = parser.parse_args().data
    crop_and_flip = AugmentConfig(crop_padding=4, horizontal_flip=0.5)
    config = DataConfig(name="npz", root=path, image_size=32, batch_size=BATCH, augment=crop_and_flip)
    loader = load_data(config, 0, torch.device("cpu"), channels_last=True).train
    warm = next(iter(loader))[0]
    epochs = {name: _epoch(model, loss, loader) for name, (model, loss) in _variants(warm).items()}
    facts = facts_of_run()
    seconds: dict[str, list[float]] = {name: [] for name in epochs}
    for name in itertools.cycle(epochs):
        started = time.perf_counter()
        steps = len(list(itertools.islice(epochs[name], TURN)))
        seconds[name].append(time.perf_counter() - started)
        if steps < TURN and name == list(epochs)[-1]:
            break
    OUT.write_text(json.dumps({"seconds": {n: _parts(each) for n, each in seconds.items()}, **facts}, indent=1) + "\n")
    print(epoch_table())


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _variants(images: Tensor) -> dict[str, tuple[nn.Module, Loss]]:
    """Name to a model and its loss of logits, images and labels."""
    torch.manual_seed(0)
    floating = resnet20().to(memory_format=torch.channels_last)
    teacher = Distillation(copy.deepcopy(floating), amp=torch.bfloat16)
    found: dict[str, tuple[nn.Module, Loss]] = {"float": (floating, _of_labels)}
    for bits in (8, 4, 2):
        recipe = qat.QuantRecipe({"bits": bits}, {"bits": bits}, first_bits=8, last_bits=8)
        prepared = qat.prepare(copy.deepcopy(floating), recipe, images)
        qat.calibrate(prepared, images)
        found[f"W{bits}A{bits}"] = (prepared, _of_labels)
    student = copy.deepcopy(found["W4A4"][0])
    found["W4A4, distillation"] = (student, lambda z, x, y: _of_labels(z, x, y) + teacher(z, x))
    return found


def _of_labels(logits: Tensor, _images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def _epoch(model: nn.Module, loss: Loss, loader: qat.training.data.loaders.Loader) -> Iterator[None]:
    """One step at each `next`, after two that warm up."""
    model.train()
    optimizer = torch.optim.SGD(qat.parameter_groups(model, 1e-3, 1e-4), momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(images), images, labels).backward()
        optimizer.step()

    for images, labels in itertools.islice(loader, 2):
        step(images, labels)
    return (step(images, labels) for images, labels in loader)


def _parts(turns: list[float]) -> list[float]:
    """The seconds of each third of the epoch."""
    size = -(-len(turns) // PARTS)
    return [round(sum(turns[start : start + size]), 2) for start in range(0, len(turns), size)]


def epoch_table() -> str:
    """The Markdown of what is kept."""
    kept = json.loads(OUT.read_text())
    lines = ["| epoch of ResNet-20 | seconds | of float's | lowest and highest third |", "|---|---:|---:|---:|"]
    base = kept["seconds"]["float"]
    for name, parts in kept["seconds"].items():
        ratios = [part / float_part for part, float_part in zip(parts, base, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| {name} | {sum(parts):.1f} | {statistics.median(ratios):.2f} | {spread} |")
    return "\n".join([*lines, "", f"Batches of {BATCH}, crop and flip. {conditions_of(kept)}."]) + "\n"


if __name__ == "__main__":
    main()
