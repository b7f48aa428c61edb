"""Classify pictures, or their pixels: the classes with the highest scores, integer model and float."""

import argparse
import json
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from qat.cli.runs import add_run, count, open_run
from qat.cli.runtimes import RUNTIMES
from qat.text import table
from qat.training.data.images import read_picture
from qat.training.errors import problems_of

EXAMPLE = "python -m qat predict runs/resnet_int8 photo.png --compare"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a picture file")
    parser.add_argument("--top", type=count, default=5, metavar="N", help="classes to show; default: 5")
    parser.add_argument(
        "--runtime", choices=("torch", *RUNTIMES), help="default: onnxruntime, or litert, if there is a file"
    )
    parser.add_argument("--compare", action="store_true", help="show the float model's scores beside them")
    drawn = "for segmentation: where pictures with their classes drawn go; default: predictions"
    parser.add_argument("--to", default="predictions", metavar="FOLDER", help=drawn)
    parser.add_argument("--json", action="store_true", help="write JSON: file, runtime and scores by class")


def run(given: argparse.Namespace) -> int:
    opened = open_run(given.run_path, given.model)
    chosen = given.runtime or opened.runtime
    runtimes = [chosen, *(["float"] if given.compare else [])]
    engines = {runtime: opened.engine(runtime) for runtime in runtimes}
    found = []
    for file in given.images:
        drawn: Path | None = None
        with problems_of("IMAGE"):
            picture = opened.transform(read_picture(file))
        shares = {runtime: engine(picture)[0].softmax(0) for runtime, engine in engines.items()}
        if shares[chosen].dim() == 3:
            drawn = Path(given.to) / f"{Path(file).stem}_classes.png"
            _draw(opened.as_pixels(picture)[0], shares[chosen].argmax(0), drawn)
            answers = {name: each.argmax(0).flatten() for name, each in shares.items()}
            pixels = {name: each.bincount(minlength=len(shares[name])) for name, each in answers.items()}
            shares = {name: each / each.sum() for name, each in pixels.items()}
        # A model may have more outputs than the data had classes.
        scores = {name: dict(zip(opened.classes, each.tolist(), strict=False)) for name, each in shares.items()}
        best = {runtime: max(each, key=lambda name: each[name]) for runtime, each in scores.items()}
        found.append({"file": file, "class": best, "scores": scores, **({"drawn": str(drawn)} if drawn else {})})
        if not given.json:
            print(
                "\n".join(
                    [
                        f"{file} -> {drawn}" if drawn else file,
                        *(f"  {line}" for line in _table(shares, opened.classes, given.top)),
                        "",
                    ]
                )
            )
    if given.json:
        print(json.dumps(found, indent=1))
    return 0


def _draw(pixels: Tensor, classes: Tensor, path: Path) -> None:
    from torchvision.utils import draw_segmentation_masks  # late, since it takes seconds

    masks = torch.stack([classes == number for number in range(1, int(classes.max()) + 1)] or [classes < 0])
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = draw_segmentation_masks(pixels.permute(2, 0, 1).contiguous(), masks, alpha=0.6)
    Image.fromarray(drawn.permute(1, 2, 0).numpy()).save(path)


def _table(shares: dict[str, Tensor], classes: list[str], top: int) -> list[str]:
    first = next(iter(shares.values()))
    # The best classes of either model, in the order of the first.
    shown = torch.cat([share.topk(min(top, len(classes))).indices for share in shares.values()])
    ordered = sorted(set(shown.tolist()), key=lambda index: -float(first[index]))
    rows = [[classes[index], *(f"{100 * share[index]:.1f} %" for share in shares.values())] for index in ordered]
    return table([["class", *shares], *rows], numbers=True)
