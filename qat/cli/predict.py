"""Answers for pictures: classes with the highest scores, classes drawn by pixel, or boxes; integer model and float."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from qat.cli.runs import Run, add_run, count, number, open_run
from qat.cli.runtimes import RUNTIMES
from qat.text import table
from qat.training.data.images import read_picture
from qat.training.data.transforms import pixels_of
from qat.training.errors import UserError, problems_of
from qat.training.report.drawing import draw, drawable
from qat.training.run.folder import Json

EXAMPLE = "python -m qat predict runs/resnet_int8 photo.png --compare"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a picture file")
    parser.add_argument("--top", type=count, default=5, metavar="N", help="classes to show; default: 5")
    lowest = "for detection: lowest score, from 0 to 1, of the boxes to show; default: 0.5"
    parser.add_argument("--score", type=number, default=0.5, metavar="S", help=lowest)
    parser.add_argument(
        "--runtime", choices=("torch", *RUNTIMES), help="default: onnxruntime, or litert, if there is a file"
    )
    parser.add_argument("--compare", action="store_true", help="show the float model's scores beside them")
    drawn = "where pictures with classes or boxes drawn go, of segmentation and detection; default: predictions"
    parser.add_argument("--to", default="predictions", metavar="FOLDER", help=drawn)
    parser.add_argument("--json", action="store_true", help="write JSON: file, runtime and scores by class, or boxes")


@dataclass(frozen=True)
class Predicted:
    """Answers of each runtime for a picture, the chosen one's first."""

    file: Path
    picture: Image.Image
    images: Tensor  # the model's input, (1, 3, H, W)
    answers: dict[str, Any]

    def drawn(self, folder: str, what: str, pixels: Tensor) -> Path:
        """Save a picture, uint8 (3, H, W), under the name of its file."""
        path = Path(folder) / f"{self.file.stem}_{what}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
        return path


def run(given: argparse.Namespace) -> int:
    opened = open_run(given.run_path, given.model)
    stems = [Path(file).stem for file in given.images]
    if opened.task.kind != "labels" and len({*stems}) < len(stems):
        raise UserError("IMAGE: two pictures have one name, under which both would be drawn; give them one by one")
    runtimes = [given.runtime or opened.runtime, *(["float"] if given.compare else [])]
    engines = {runtime: opened.engine(runtime) for runtime in runtimes}
    show: Callable[[Run, Predicted, argparse.Namespace], tuple[Json, list[str]]]
    show = {"labels": _labels, "masks": _masks, "boxes": _boxes}[opened.task.kind]
    found = []
    for file in given.images:
        with problems_of("IMAGE"):
            images = opened.transform(picture := read_picture(file))
        answers = {runtime: engine(images) for runtime, engine in engines.items()}
        said, lines = show(opened, Predicted(Path(file), picture, images, answers), given)
        found.append({"file": file, **said})
        if not given.json:
            head = f"{file} -> {said['drawn']}" if "drawn" in said else file
            print("\n".join([head, *(f"  {line}" for line in lines), ""]))
    if given.json:
        print(json.dumps(found, indent=1))
    return 0


def _labels(opened: Run, predicted: Predicted, given: argparse.Namespace) -> tuple[Json, list[str]]:
    return _scores(opened, {name: each[0].softmax(0) for name, each in predicted.answers.items()}, given.top)


def _masks(opened: Run, predicted: Predicted, given: argparse.Namespace) -> tuple[Json, list[str]]:
    classes = {name: each[0].argmax(0) for name, each in predicted.answers.items()}
    chosen, width = next(iter(classes.values())), next(iter(predicted.answers.values())).shape[1]
    pixels = opened.as_pixels(predicted.images)[0].permute(2, 0, 1).contiguous()
    drawn = predicted.drawn(given.to, "classes", draw(pixels, chosen, opened.classes))
    shares = {name: each.flatten().bincount(minlength=width) / each.numel() for name, each in classes.items()}
    said, lines = _scores(opened, shares, given.top)
    return {**said, "drawn": str(drawn)}, lines


def _boxes(opened: Run, predicted: Predicted, given: argparse.Namespace) -> tuple[Json, list[str]]:
    scale = torch.tensor(predicted.picture.size * 2) / predicted.images.shape[3]
    boxes: dict[str, list[Json]] = {}
    shown = [drawable(opened.task, answers, given.score)[0] for answers in predicted.answers.values()]
    for name, found in zip(predicted.answers, shown, strict=True):
        rows = zip(found["labels"].tolist(), found["scores"].tolist(), (found["boxes"] * scale).tolist(), strict=True)
        boxes[name] = [
            {"class": opened.classes[label], "score": score, "box": [round(side, 1) for side in box]}
            for label, score, box in rows
        ]
    drawn = predicted.drawn(given.to, "boxes", draw(pixels_of(predicted.picture), shown[0], opened.classes, scale))
    lines = [
        [name, each["class"], f"{100 * each['score']:.1f} %", *(f"{side:.1f}" for side in each["box"])]
        for name, rows in boxes.items()
        for each in rows
    ]
    head = ["runtime", "class", "score", "left", "top", "right", "bottom"]
    return {"boxes": boxes, "drawn": str(drawn)}, table([head, *lines], numbers=True) if lines else ["no boxes"]


def _scores(opened: Run, shares: dict[str, Tensor], top: int) -> tuple[Json, list[str]]:
    # A model may have more outputs than the data had classes.
    scores = {name: dict(zip(opened.classes, each.tolist(), strict=False)) for name, each in shares.items()}
    best = {runtime: max(each, key=lambda name: each[name]) for runtime, each in scores.items()}
    return {"class": best, "scores": scores}, _table(shares, opened.classes, top)


def _table(shares: dict[str, Tensor], classes: list[str], top: int) -> list[str]:
    first = next(iter(shares.values()))
    # The best classes of either model, in the order of the first.
    shown = torch.cat([share.topk(min(top, len(classes))).indices for share in shares.values()])
    ordered = sorted(set(shown.tolist()), key=lambda index: -float(first[index]))
    rows = [[classes[index], *(f"{100 * share[index]:.1f} %" for share in shares.values())] for index in ordered]
    return table([["class", *shares], *rows], numbers=True)
