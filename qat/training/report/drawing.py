"""Answers drawn on images: the classes of pixels, or boxes with their classes and scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from qat.training.data.loaders import Data
from qat.training.data.transforms import ToInput
from qat.training.run.folder import Json
from qat.training.tasks.detection import Detection
from qat.training.tasks.labels import IGNORED
from qat.training.tasks.task import Task

COMPARED = 200  # validation images of which those that differ most are drawn
ROWS, SIDE = 6, 224  # images drawn, and their sides in pixels
LOWEST, OVERLAP = 0.5, 0.5  # score of boxes that are drawn; from which on two of a class are partners


def draw(pixels: Tensor, answer: Any, names: list[str], scale: float | Tensor = 1.0) -> Tensor:
    """Draw an answer on uint8 pixels (3, H, W): a mask, or boxes times `scale`."""
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks  # late, since it takes seconds

    masked = isinstance(answer, Tensor)
    labels = (answer[(answer != 0) & (answer != IGNORED)].unique() if masked else answer["labels"]).tolist()
    if not labels:
        return pixels
    colours = [f"hsl({137 * label % 360}, 90%, 60%)" for label in labels]  # by the golden angle neighbours differ
    if masked:
        large = F.interpolate(answer[None, None].float(), pixels.shape[1:])[0]
        drawn = draw_segmentation_masks(pixels, large == torch.tensor(labels)[:, None, None], 0.6, colours)
    else:
        scores = [f" {score:.2f}" for score in answer.get("scores", torch.tensor([])).tolist()] or [""] * len(labels)
        known = dict(enumerate(names))  # a model may have more classes than the data
        texts = [f"{known.get(label, label)}{score}" for label, score in zip(labels, scores, strict=True)]
        drawn = draw_bounding_boxes(pixels, answer["boxes"] * scale, texts, colours, width=2, fill_labels=True)
    return torch.as_tensor(drawn)


def drawable(task: Task, answers: Any, lowest: float = LOWEST) -> list[Any]:
    """Return each image's mask, or its boxes of at least this score."""
    if task.kind == "masks":
        return list(task.classes(answers).cpu())
    assert isinstance(task, Detection)
    boxes = ((found, found["scores"] >= lowest) for found in task.boxes(answers))
    return [{key: each[shown].cpu() for key, each in found.items()} for found, shown in boxes]


def difference(one: Any, two: Any) -> float:
    """Return the percentage of pixels that differ, or the number of boxes without a partner."""
    if isinstance(one, Tensor):
        return 100 * float((one != two).double().mean())
    from torchvision.ops import box_iou

    partners = (one["labels"][:, None] == two["labels"]) & (box_iou(one["boxes"], two["boxes"]) > OVERLAP)
    return float((~partners.any(0)).sum() + (~partners.any(1)).sum())


@torch.no_grad()
def draw_answers(path: Path, models: dict[str, Callable[[Tensor], Any]], data: Data, task: Task) -> Json:
    """Draw the images on which the first two models differ most; return the picture's titles."""
    from torchvision.utils import make_grid

    def answered(images: Tensor, count: int | None = None) -> list[list[Any]]:
        return [drawable(task, task.answers(model(images), images)) for model in list(models.values())[:count]]

    rows, seen = list[tuple[float, Tensor, Tensor]](), 0
    for images, labels in data.val:
        rows += zip(map(difference, *answered(images, 2)), images, labels, strict=True)
        rows, seen = sorted(rows, key=lambda row: -row[0])[:ROWS], seen + len(images)
        if seen >= COMPARED:
            break
    differing, chosen, truths = zip(*rows, strict=True)
    if task.kind == "boxes":
        true = (each[each[:, 0] >= 0] for each in truths)
        truths = tuple({"labels": each[:, 0].long(), "boxes": each[:, 1:5]} for each in true)
    images = torch.stack(chosen)
    large = F.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True)
    pixels = ToInput(data.preprocessing.mean, data.preprocessing.std).undone(large)
    table = zip(pixels, truths, *answered(images), strict=True)
    tiles = [draw(image, each, data.classes, SIDE / images.shape[3]) for image, *row in table for each in row]
    grid = make_grid(tiles, nrow=1 + len(models), padding=2, pad_value=255)
    Image.fromarray(grid.permute(1, 2, 0).numpy()).save(path)
    unit = "boxes differ" if task.kind == "boxes" else "% of the pixels differ"
    return {"columns": ["truth", *models], "differing": [round(each, 2) for each in differing], "unit": unit}
