"""Data sets by name, each with a builder of its two splits of images and labels.

Small sets are read into memory; for image folders, only the list of files is.
"""

import io
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stderr
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from qat.text import first_line
from qat.training.config.imports import users_callable
from qat.training.config.schema import WITHOUT_FILES, DataConfig
from qat.training.data.boxes import read_coco, read_voc, read_yolo
from qat.training.data.images import Dataset, ImageArray, ImageFiles, Images, MaskFiles, paths_of
from qat.training.data.masks import read_mask_folder
from qat.training.data.scenes import draw_scenes
from qat.training.data.transforms import Channels
from qat.training.errors import UserError, looked_in, reading, value_errors_reported
from qat.training.run.logging import on_terminal
from qat.training.tasks.task import Kind

logger = logging.getLogger("qat")

IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)


DOWNLOADED = ("cifar10", "cifar100", "mnist", "fashion_mnist", "voc", "voc_boxes")


def build_dataset(config: DataConfig, seed: int, kind: Kind = "labels") -> Dataset:
    """Read or make the data set of a config; of one that has several, choose the kind of labels."""
    own, why = ":" in config.name, WITHOUT_FILES.get(config.name)
    if why is not None and config.root is not None:
        raise UserError(f"data.root: '{config.root}' has no effect: data.name '{config.name}' is {why}; leave it out")
    if not (own or config.root or why):
        where = "the .npz file" if config.name == "npz" else "the folder"
        raise UserError(f"data.root: missing; data.name '{config.name}' needs the path of {where}")
    if config.download and config.name not in DOWNLOADED:
        raise UserError(f"data.download: true has no effect with '{config.name}'; it is for {', '.join(DOWNLOADED)}")
    if config.name == "canvases":
        return _canvases(config, seed, kind)
    if not own:
        return _BUILDERS[config.name](config, seed)
    with users_callable("data.name", config.name) as builder:
        dataset = builder(config)
    if not isinstance(dataset, Dataset):
        what = f"it must return a {Dataset.__module__}.{Dataset.__name__}"
        raise UserError(f"data.name: '{config.name}' returned {type(dataset).__name__}; {what}")
    return dataset


def seeded_generator(seed: int, purpose: str, epoch: int = 0) -> torch.Generator:
    """Return a CPU generator for a seed, a purpose and an epoch."""
    # A hash: torch's generators of neighbouring seeds would be related.
    mixed = np.random.SeedSequence([seed, epoch, *purpose.encode()]).generate_state(1)[0]
    return torch.Generator().manual_seed(int(mixed))


def _written() -> tuple[ImageArray, ImageArray]:
    # Every fifth image of each class is for validation (see digits.md).
    images, labels = read_digits()
    in_val = np.zeros(len(labels), bool)
    in_val[np.argsort(labels, kind="stable")[::5]] = True
    return _array(images[~in_val], labels[~in_val]), _array(images[in_val], labels[in_val])


def _canvases(config: DataConfig, seed: int, kind: Kind = "masks") -> Dataset:
    splits = []
    for name, digits, count in zip(SPLITS, _written(), (960, 240), strict=True):
        generator = seeded_generator(0, f"canvases_{name}")
        drawn = draw_scenes(digits.images[:, 0], digits.labels, count, config.image_size, generator)
        splits.append(ImageArray(drawn[0], drawn[2 if kind == "boxes" else 1]))
    return Dataset(splits[0], splits[1], ["background", *(str(digit) for digit in range(10))])


def _voc(config: DataConfig, seed: int) -> Dataset:
    from torchvision import datasets  # late, since it takes seconds

    root, boxed = Path(os.path.expanduser(str(config.root))), config.name == "voc_boxes"
    try:
        reader = datasets.VOCDetection if boxed else datasets.VOCSegmentation
        found = [reader(root, image_set=name, download=config.download) for name in SPLITS]
    except (OSError, RuntimeError) as error:
        how = f"could not be downloaded ({first_line(error)})" if config.download else "is not there"
        raise UserError(f"data.root: '{root}': VOC 2012 {how}; it lies in {root}/VOCdevkit/VOC2012") from error
    train, val = (
        read_voc(each.images, each.targets, VOC)
        if boxed
        else MaskFiles(paths_of(each.images), paths_of(each.targets), len(VOC))
        for each in found
    )
    return Dataset(train, val, list(VOC), IMAGENET_MEAN, IMAGENET_STD)


VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table",
    "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv monitor",
)  # fmt: skip


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Cut the bundled sheet into uint8 images (1797, 8, 8) and labels."""
    with resources.files("qat.training.data").joinpath("digits.png").open("rb") as file, Image.open(file) as sheet:
        pixels = np.array(sheet)
        labels = np.array([int(digit) for digit in sheet.info["Labels"]])
    side = 8
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    tiles = pixels.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, side, side)
    return tiles[: len(labels)], labels


def _fake(config: DataConfig, seed: int) -> Dataset:
    generator = seeded_generator(seed, "fake")

    def split(count: int) -> ImageArray:
        shape = (count, 3, config.image_size, config.image_size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return ImageArray(images, torch.randint(0, 10, (count,), generator=generator))

    return Dataset(split(512), split(128), [str(label) for label in range(10)])


def _folder(config: DataConfig, seed: int) -> Dataset:
    readers: dict[str, Callable[[Path], tuple[Mapping[str, Images], list[str]]]]
    readers = {"masks": read_mask_folder, "coco": read_coco, "yolo": read_yolo}
    splits, classes = readers.get(config.name, read_image_folder)(Path(os.path.expanduser(str(config.root))))
    return Dataset(splits["train"], splits["val"], classes, IMAGENET_MEAN, IMAGENET_STD)


_TORCHVISION: dict[str, tuple[str, Channels, Channels]] = {  # classes of torchvision, mean and deviation
    "cifar10": ("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ("CIFAR100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "mnist": ("MNIST", (0.1307, 0.1307, 0.1307), (0.3081, 0.3081, 0.3081)),
    "fashion_mnist": ("FashionMNIST", (0.2860, 0.2860, 0.2860), (0.3530, 0.3530, 0.3530)),
}


def _torchvision_set(config: DataConfig, seed: int) -> Dataset:
    from torchvision import datasets  # late, since it takes seconds

    reader, mean, std = _TORCHVISION[config.name]
    root = Path(os.path.expanduser(str(config.root)))
    try:
        with nullcontext() if on_terminal() else redirect_stderr(io.StringIO()):  # no progress bars in a file
            splits = [getattr(datasets, reader)(root, train, download=config.download) for train in (True, False)]
    except (OSError, RuntimeError, ValueError, AssertionError, LookupError, EOFError) as error:
        if config.download:
            raise UserError(f"data.download: {config.name} could not be downloaded ({first_line(error)})") from error
        raise UserError(f"data.root: '{root}' has no complete {config.name}; set data.download: true") from error
    with value_errors_reported(f"data.root: '{root}': the files of {config.name} are damaged: "):
        train, val = (_array(np.asarray(split.data), np.asarray(split.targets)) for split in splits)
        return Dataset(train, val, list(splits[0].classes), mean, std)


_NPZ_ARRAYS = ("x_train", "y_train", "x_val", "y_val")


def _npz(config: DataConfig, seed: int) -> Dataset:
    # Images are uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3).
    path = Path(os.path.expanduser(str(config.root)))
    where = f"data.root: '{path}'"
    if not path.is_file():
        raise UserError(f"{where} is not a file{looked_in(path)}; it must be an .npz with {', '.join(_NPZ_ARRAYS)}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in (*_NPZ_ARRAYS, "classes") if name in archive}
    except Exception as error:  # for a damaged archive, zipfile, zlib and NumPy raise different errors
        raise UserError(f"{where} is not an .npz of plain arrays ({first_line(error)})") from error
    absent = [name for name in _NPZ_ARRAYS if name not in arrays]
    if absent:
        raise UserError(f"{where} has no {', '.join(absent)}")
    with value_errors_reported(f"{where}: "):
        train, val = (_array(arrays[f"x_{name}"], arrays[f"y_{name}"]) for name in ("train", "val"))
        numbers = np.arange(arrays["y_train"].max(initial=0) + 1)  # the names of classes, if there are no others
        return Dataset(train, val, arrays.get("classes", numbers).astype(str).tolist())


def _array(images: np.ndarray, labels: np.ndarray) -> ImageArray:
    if images.ndim not in (3, 4) or labels.dtype.kind not in "iu":
        form = "images must be (N, H, W) or (N, H, W, C) and labels integers"
        raise ValueError(f"{form}, got {images.shape} and {labels.dtype}")
    first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return ImageArray(torch.from_numpy(first), torch.from_numpy(labels.astype(np.int64)))


_BUILDERS: dict[str, Callable[[DataConfig, int], Dataset]] = {
    "digits": lambda config, seed: Dataset(*_written(), [str(digit) for digit in range(10)]),
    "npz": _npz,
    "fake": _fake,
    "canvases": _canvases,
    "voc": _voc,
    "voc_boxes": _voc,
    **dict.fromkeys(("imagefolder", "imagenet", "masks", "coco", "yolo"), _folder),
    **dict.fromkeys(_TORCHVISION, _torchvision_set),
}

SPLITS = ("train", "val")
# As in torchvision's ImageFolder, and .gif, of which the first picture counts.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")


def read_image_folder(root: Path) -> tuple[dict[str, ImageFiles], list[str]]:
    with reading(f"'{root}'", f"{root}/train/<class>/ and {root}/val/<class>/"):
        found = {}
        for split in SPLITS:
            folders = (entry.name for entry in os.scandir(root / split) if entry.is_dir())
            found[split] = sorted(name for name in folders if name[0] != ".")
            if not found[split]:
                raise UserError(f"data.root: '{root / split}' holds no class folders")
        classes = found["train"]
        differing = sorted({*classes} ^ {*found["val"]})
        if differing:
            raise UserError(f"data.root: '{root}': train and val need the same classes; they differ in {differing[:5]}")
        return {split: _image_files(root / split, classes) for split in SPLITS}, classes


def _image_files(folder: Path, classes: list[str]) -> ImageFiles:
    files = [_files_below(folder / name) for name in classes]
    found = [[path for path in paths if path.lower().endswith(EXTENSIONS)] for paths in files]
    others = [path for paths in files for path in paths if not path.lower().endswith(EXTENSIONS)]
    others += [each.name for each in os.scandir(folder) if each.is_file() and each.name[0] != "."]
    kinds = " ".join(EXTENSIONS)
    if empty := [name for name, paths in zip(classes, found, strict=True) if not paths]:
        raise UserError(f"data.root: '{folder}' has class folders without images ({kinds}): {', '.join(empty[:5])}")
    if counts := Counter(sorted(os.path.splitext(path)[1].lower() for path in others)):
        left = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in counts.most_common(5))
        logger.info("data: '%s': files that are not read: %s; images lie in class folders, as %s", folder, left, kinds)
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(paths) for paths in found]))
    return ImageFiles(paths_of(path for paths in found for path in paths), labels)


def _files_below(folder: Path) -> list[str]:
    def fail(error: OSError) -> None:
        raise error

    paths: list[str] = []
    for place, subfolders, files in os.walk(folder, onerror=fail, followlinks=True):
        subfolders[:] = [name for name in subfolders if name[0] != "."]  # os.walk then leaves the others out
        for link in (Path(place, name) for name in subfolders if os.path.islink(os.path.join(place, name))):
            if link.resolve() in (folder.resolve(), *folder.resolve().parents):
                raise UserError(f"data.root: '{link}' is a link that leads back up to '{link.resolve()}'; remove it")
        paths += [os.path.join(place, name) for name in files if name[0] != "."]
    return sorted(paths, key=os.path.split)
