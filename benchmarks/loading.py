"""What the data costs: images per second of a set in memory, one by one and in batches, beside a training step.

python -m benchmarks.loading --data FILE.npz    # arrays of 32 x 32 images; keeps results/loading.json
python -m benchmarks.document                   # writes the table into docs/speed.md
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import qat
from benchmarks.cifar_resnet import resnet20
from benchmarks.speed_rows import facts_of_run
from benchmarks.speed_table import conditions_of
from qat.training.config.schema import AugmentConfig, DataConfig
from qat.training.data.batched import BatchTransform
from qat.training.data.loaders import Loader, load_data

OUT = Path(__file__).resolve().parent / "results" / "loading.json"
BATCH, IMAGES, ROUNDS = 128, 12_800, 5

AUGMENTATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "crop, flip": {"crop_padding": 4, "horizontal_flip": 0.5},
    "crop, flip, cutout": {"crop_padding": 4, "horizontal_flip": 0.5, "cutout": 16},
    "crop, flip, erasing": {"crop_padding": 4, "horizontal_flip": 0.5, "random_erasing": 0.5},
}


def main() -> None:
    """Measure in turns, keep medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="an .npz file as data.name npz reads it")
    path = parser.parse_args().data
    rows = []
    for name, augment in AUGMENTATIONS.items():
        loaders = [_loader(path, augment, in_batches) for in_batches in (False, True)]
        seconds = [[_seconds(loader) for loader in loaders] for _ in range(ROUNDS)]
        one_by_one, batched = (IMAGES / statistics.median(each) for each in zip(*seconds, strict=True))
        rows.append({"augmentation": name, "one_by_one": round(one_by_one), "batched": round(batched)})
        print(rows[-1], flush=True)
    steps = _steps(next(iter(_loader(path, AUGMENTATIONS["crop, flip"], True))))
    OUT.write_text(json.dumps({"rows": rows, "steps": steps, **facts_of_run()}, indent=1) + "\n")
    print(loading_table())


def _loader(path: str, augment: dict[str, Any], in_batches: bool) -> Loader:
    config = DataConfig(
        name="npz", root=path, image_size=32, batch_size=BATCH, limit_train=IMAGES, augment=AugmentConfig(**augment)
    )
    takes = BatchTransform.takes if in_batches else lambda *_: False
    with mock.patch.object(BatchTransform, "takes", takes):
        return load_data(config, 0, torch.device("cpu"), False).train


def _seconds(loader: Loader) -> float:
    started = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - started


def _steps(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Milliseconds of a training step of ResNet-20, in float and with weights and activations of 4 bits, in turns."""
    images, labels = batch
    recipe = qat.QuantRecipe(weight={"bits": 4}, activation={"bits": 4}, first_bits=8, last_bits=8)
    prepared = qat.prepare(resnet20(), recipe, images)
    qat.calibrate(prepared, images)
    steps = {"float": _step(resnet20(), images, labels), "W4A4": _step(prepared, images, labels)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(3 + 8 * ROUNDS):
        for name, step in steps.items():
            started = time.perf_counter()
            next(step)
            if round_ >= 3:  # the first ones warm up
                seconds[name].append(time.perf_counter() - started)
    return {name: round(1000 * statistics.median(each), 2) for name, each in seconds.items()}


def _step(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Iterator[None]:
    model.train()
    optimizer = torch.optim.SGD(qat.parameter_groups(model, 0.01, 1e-4), momentum=0.9)
    while True:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        yield


def loading_table() -> str:
    """The Markdown of what is kept."""
    kept = json.loads(OUT.read_text())
    lines = ["| augmentation | one by one, images/s | in batches, images/s | factor |", "|---|---:|---:|---:|"]
    for row in kept["rows"]:
        factor = row["batched"] / row["one_by_one"]
        lines.append(f"| {row['augmentation']} | {row['one_by_one']:,} | {row['batched']:,} | {factor:.1f} |")
    by_name = {row["augmentation"]: row for row in kept["rows"]}
    load = 1000 * BATCH / by_name["crop, flip"]["batched"]
    parts = (
        f"{name} {step:.0f} ms, of which loading with crop and flip would be {100 * load / (step + load):.1f} %"
        for name, step in kept["steps"].items()
    )
    lines += ["", f"A training step of ResNet-20, batch {BATCH}: {'; '.join(parts)}.", "", f"{conditions_of(kept)}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
