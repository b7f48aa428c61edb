"""Folders of images and boxes, and transforms that move an image and its boxes together."""

import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import torch
import yaml
from torch import Tensor

from qat.training.config.schema import AugmentConfig
from qat.training.data.images import BoxFiles, paths_of
from qat.training.data.masks import SUFFIXES, WITHOUT_MASKS
from qat.training.data.transforms import Picture, Preprocessing, ToInput, resized
from qat.training.errors import UserError, reading

logger = logging.getLogger("qat")

WITHOUT_BOXES = ("crop_padding", *WITHOUT_MASKS)
"""Augmentations that would leave the boxes where they were, or box what is erased."""

Row: TypeAlias = list[float]  # label, x1, y1, x2, y2, crowd


def read_coco(root: Path) -> tuple[dict[str, BoxFiles], list[str]]:
    """Read both splits in COCO's format, and the names of the categories in the order of their ids."""
    splits: dict[str, BoxFiles] = {}
    names: dict[int, str] = {}
    for split in ("train", "val"):
        folder = _there(root / split, root / f"{split}2017")
        file = _there(root / f"annotations/{split}.json", root / f"annotations/instances_{split}2017.json")
        with reading(f"'{file}'", f"annotations in COCO's format of the images in {folder}"):
            content = json.loads(file.read_bytes())
            found = dict(sorted((each["id"], str(each["name"])) for each in content["categories"]))
            names = names or found
            if found != names or len(found) < len(content["categories"]):
                raise ValueError("its categories are not those of train, or two have one id")
            labels = {category: label for label, category in enumerate(names, 1)}
            objects: dict[object, list[Row]] = {image["id"]: [] for image in content["images"]}
            sizes = {image["id"]: (float(image["width"]), float(image["height"])) for image in content["images"]}
            if len(objects) < len(content["images"]) or not all(math.prod(size) > 0 for size in sizes.values()):
                raise ValueError("two images have one id, or an image has no width or height")
            for each in content["annotations"]:
                form = "a bbox of x, y, width, height, and an image_id and a category_id that the file lists"
                with reading(f"'{file}': annotation {each['id']}", form):
                    x, y, width, height = map(float, each["bbox"])
                    crowd, sides = float(each.get("iscrowd", 0)), sizes[each["image_id"]] * 2
                    label, *box, _ = _row(labels[each["category_id"]], x, y, x + width, y + height, crowd)
                    # Shares of the image stay right where it was resized after it was annotated.
                    shares = [side / whole for side, whole in zip(box, sides, strict=True)]
                    objects[each["image_id"]].append([label, *shares, crowd])
            paths = [folder / image["file_name"] for image in content["images"]]
        splits[split] = _box_files(file, paths, objects.values(), len(labels) + 1)
    return splits, ["background", *names.values()]


def read_voc(images: list[str], annotations: list[str], classes: Sequence[str]) -> BoxFiles:
    """Read PASCAL VOC's annotations, an XML file for each image."""
    labels, objects = {name.replace(" ", ""): label for label, name in enumerate(classes)}, []
    for annotation in annotations:
        with reading(f"'{annotation}'", "an XML file of VOC for each image"):
            tree, rows = ElementTree.parse(annotation).getroot(), []
        for number, each in enumerate(tree.iterfind("object"), 1):
            with reading(f"'{annotation}': object {number}", f"a bndbox, and one of {', '.join(labels)}"):
                label, hard = labels[each.findtext("name", "")], float(each.findtext("difficult", 0))
                x1, y1, x2, y2 = (float(each.findtext(f"bndbox/{key}", "")) for key in ("xmin", "ymin", "xmax", "ymax"))
                rows.append(_row(label, x1 - 1, y1 - 1, x2, y2, hard))  # VOC counts from 1 on, the last pixel included
        objects.append(rows)
    # In pixels: tools that write this format leave sizes at 0.
    return _box_files(Path(annotations[0]).parent, images, objects, len(classes), largest=math.inf)


def read_yolo(root: Path) -> tuple[dict[str, BoxFiles], list[str]]:
    """Read the images and text files of both splits, and the names of the classes."""
    splits, named = {}, _there(root / "classes.txt", root / "data.yaml")
    with reading(f"'{named}'", f"the name of each class on a line, or names in {root}/data.yaml"):
        text = named.read_text(encoding="utf-8-sig")
        lines = [*filter(None, map(str.strip, text.splitlines()))]
        names = yaml.safe_load(text)["names"] if named.suffix == ".yaml" else lines
        if isinstance(names, str):
            raise ValueError("names is a text, and no list")
        classes = [str(names[number]) for number in range(len(names))]  # of a list, or a dict with these keys
    for split in ("train", "val"):
        folder, beside = root / split / "images", root / split / "labels"
        with reading(f"'{folder}'", f"images there and their text files in {beside}"):
            images = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES]
            files = {path.stem: path for path in beside.glob("*.txt") if path.name != "classes.txt"}
        if images and not files:
            raise UserError(f"data.root: '{beside}' has no .txt of an image; each with objects has one there")
        if lonely := sorted({*files} - {path.stem for path in images}):
            raise UserError(f"data.root: '{files[lonely[0]]}' has no image in '{folder}' ({' '.join(SUFFIXES)})")
        rows = [_yolo_rows(files[path.stem], len(classes)) if path.stem in files else [] for path in images]
        splits[split] = _box_files(folder, images, rows, len(classes) + 1)
    return splits, ["background", *classes]


def _yolo_rows(file: Path, classes: int) -> list[Row]:
    rows = []
    form = f"a class from 0 to {classes - 1}, then centre x and y, width, height, or a polygon, all shares of the image"
    with reading(f"'{file}'", form):
        for line in filter(str.strip, file.read_text(encoding="utf-8-sig").splitlines()):
            label, *box = map(float, line.split())
            fits = label in range(classes) and len(box) >= 4 and len(box) % 2 == 0
            if not fits or not all(-0.01 <= share <= 1.01 for share in box):  # tools round
                raise ValueError(f"the line {line}")
            x, y = box[::2], box[1::2]
            if len(box) == 4:
                x, y = ([centre - side / 2, centre + side / 2] for centre, side in (x, y))
            rows.append(_row(label + 1, min(x), min(y), max(x), max(y), 0))
    return rows


def _there(first: Path, second: Path) -> Path:
    return second if second.exists() and not first.exists() else first


def _row(label: float, x1: float, y1: float, x2: float, y2: float, crowd: float) -> Row:
    if not (-math.inf < x1 <= x2 < math.inf and -math.inf < y1 <= y2 < math.inf):
        raise ValueError(f"a box from ({x1:g}, {y1:g}) to ({x2:g}, {y2:g})")
    return [label, x1, y1, x2, y2, crowd]


def _box_files(
    where: Path, paths: Sequence[Any], objects: Iterable[list[Row]], classes: int, largest: float = 1.0
) -> BoxFiles:
    # Boxes are shares of their images, to which they are clamped, or pixels. Some of COCO's have no area.
    if not paths:
        raise UserError(f"data.root: '{where}' has no images ({' '.join(SUFFIXES)})")
    images = torch.arange(len(paths)).repeat_interleave(torch.tensor([len(rows) for rows in objects]))
    rows = torch.tensor([row for each in objects for row in each], dtype=torch.float64).view(-1, 6)
    if lost := [path for path in paths if not os.path.exists(path)]:
        raise UserError(f"data.root: '{lost[0]}' does not exist, and {len(lost) - 1} more images of '{where}'")
    rows[:, 1:5] = rows[:, 1:5].clamp(0, largest)
    rows = rows.float()
    kept = (rows[:, 3:5] > rows[:, 1:3]).all(1)
    counts = images[kept].bincount(minlength=len(paths))
    if dropped := images[~kept].tolist():
        what = "boxes without area in their image are left out, as of"
        logger.info("data: '%s': %d %s %s", where, len(dropped), what, paths[dropped[0]])
    if empty := int((counts == 0).sum()):
        logger.info("data: '%s': %d of %d images are without objects", where, empty, len(paths))
    return BoxFiles(paths_of(paths), rows[kept], counts.cumsum(0), classes, shares=largest == 1)


class BoxedTransform:
    """Augmentation of an image and its boxes together, the stretch to a square, and normalization of the image.

    Boxes that a crop or a rotation cuts to at most a pixel are left out.
    """

    def __init__(self, augment: AugmentConfig, plain: Preprocessing) -> None:
        from torchvision.transforms import InterpolationMode, v2  # late, since it takes seconds

        if wrong := [name for name in WITHOUT_BOXES if getattr(augment, name)]:
            raise UserError(f"data.augment.{wrong[0]}: has no meaning for boxes; leave it out")
        self.size, self.normalise = plain.image_size, ToInput(plain.mean, plain.std)
        self.least = 1 if augment.random_resized_crop or augment.affine else 0
        self.crop = v2.RandomIoUCrop() if augment.random_resized_crop else None
        moves: list[torch.nn.Module] = [v2.RandomHorizontalFlip(augment.horizontal_flip)]
        if augment.affine:
            moves.append(v2.RandomAffine(10, (0.1, 0.1), (0.9, 1.1), interpolation=InterpolationMode.BILINEAR))
        self.moves = v2.Compose([*moves, v2.ClampBoundingBoxes()])

    def __call__(self, picture: Picture, rows: Tensor) -> tuple[Tensor, Tensor]:
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        shape = functional.get_size(picture)
        boxes: Tensor = tv_tensors.BoundingBoxes(rows[:, 1:5], format="XYXY", canvas_size=shape)
        picture, boxes = self.crop(picture, boxes) if self.crop else (picture, boxes)
        boxes = functional.resize(boxes, [self.size, self.size])
        moved, boxes = self.moves(resized(picture, self.size, stretched=True), boxes)
        corners = boxes.as_subclass(Tensor)
        kept = (corners[:, 2:] - corners[:, :2] > self.least).all(1)
        return self.normalise(moved), torch.cat([rows[:, :1], corners, rows[:, 5:]], dim=1)[kept]
