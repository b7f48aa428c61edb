"""The data sets by name: one builder each, from the config to two splits of images and labels.

Small sets are read into memory; of folders only the list of files is.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from qat.training.config import DataConfig
from qat.training.errors import UserError
from qat.training.images import ImageArray, ImageFiles, Images
from qat.training.npz import read_npz
from qat.training.transforms import Channels

logger = logging.getLogger("qat")

HALF: Channels = (0.5, 0.5, 0.5)
IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Dataset:
    """Two splits, the names of the classes that the labels count, and the set's own normalisation."""

    train: Images
    val: Images
    classes: list[str]
    mean: Channels
    std: Channels


def build_dataset(config: DataConfig, seed: int) -> Dataset:
    """Find and open the data set that `config` names.

    Args:
        config: the section `data` of a run's config.
        seed: of the random images of `fake`; the others do not depend on it.

    Raises:
        UserError: something is missing, damaged or of another form, or a setting has no effect with this set.
    """
    problems = []
    if config.name in ("digits", "fake") and config.root is not None:
        kind = "bundled" if config.name == "digits" else "made up"
        problems.append(f"data.root: '{config.root}' has no effect: data.name '{config.name}' is {kind}; leave it out")
    if config.name not in ("digits", "fake") and not config.root:
        where = "the .npz file" if config.name == "npz" else "the folder"
        problems.append(f"data.root: missing; data.name '{config.name}' needs the path of {where}")
    if config.download and config.name not in _DOWNLOADS:
        problems.append(
            f"data.download: true has no effect with data.name '{config.name}'; only {', '.join(_DOWNLOADS)} can be "
            "downloaded"
        )
    if problems:
        raise UserError(*problems)
    return _BUILDERS[config.name](config, seed)


def seeded_generator(seed: int, purpose: str, epoch: int = 0) -> torch.Generator:
    """Return a CPU generator of its own for each seed, purpose and epoch; neighbouring ones are unrelated."""
    mixed = np.random.SeedSequence([seed, epoch, *purpose.encode()]).generate_state(1)[0]
    return torch.Generator().manual_seed(int(mixed))


def _digits(config: DataConfig, seed: int) -> Dataset:
    """Split the bundled digits once and for all: of each class, every fifth image is for validation (digits.md)."""
    images, labels = read_digits()
    in_val = np.zeros(len(labels), bool)
    in_val[np.argsort(labels, kind="stable")[::5]] = True
    train, val = (_array(images[chosen], labels[chosen]) for chosen in (~in_val, in_val))
    return Dataset(train, val, [str(digit) for digit in range(10)], HALF, HALF)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Cut the bundled sheet into its tiles: uint8 images (1797, 1, 8, 8), 15 grey levels a step of ink, and labels."""
    with resources.files("qat.training").joinpath("digits.png").open("rb") as file, Image.open(file) as sheet:
        pixels = np.array(sheet)
        labels = np.array([int(digit) for digit in sheet.info["Labels"]])
    side = 8
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    tiles = pixels.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, 1, side, side)
    return tiles[: len(labels)], labels


def _fake(config: DataConfig, seed: int) -> Dataset:
    generator = seeded_generator(seed, "fake")

    def split(count: int) -> ImageArray:
        shape = (count, 3, config.image_size, config.image_size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return ImageArray(images, torch.randint(0, 10, (count,), generator=generator))

    return Dataset(split(512), split(128), [str(label) for label in range(10)], HALF, HALF)


def _imagefolder(config: DataConfig, seed: int) -> Dataset:
    root = Path(os.path.expanduser(config.root or ""))
    layout = f"expected {root}/train/<class>/ and {root}/val/<class>/"
    if not root.is_dir():
        raise UserError(f"data.root: '{root}' is not a folder; {layout}")
    absent = [name for name in ("train", "val") if not (root / name).is_dir()]
    if absent:
        raise UserError(f"data.root: '{root}' has no folder {' and no folder '.join(absent)}; {layout}")
    classes = _class_folders(root / "train", layout)
    val_classes = _class_folders(root / "val", layout)
    differing = [
        f"only in {name}: {_some(sorted(set(these) - set(those)))}"
        for name, these, those in (("train", classes, val_classes), ("val", val_classes, classes))
        if set(these) - set(those)
    ]
    if differing:
        raise UserError(f"data.root: '{root}': train and val need the same class folders; {'; '.join(differing)}")
    train, val = (_image_files(root / name, classes) for name in ("train", "val"))
    return Dataset(train, val, classes, IMAGENET_MEAN, IMAGENET_STD)


def _imagenet(config: DataConfig, seed: int) -> Dataset:
    dataset = _imagefolder(config, seed)
    if len(dataset.classes) != 1000:
        logger.warning("data.root: '%s' has %d classes; ImageNet has 1000", config.root, len(dataset.classes))
    return dataset


def _class_folders(folder: Path, layout: str) -> list[str]:
    """Return the names of a split's class folders, sorted; hidden folders (.ipynb_checkpoints) are no classes."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError as error:
        raise UserError(f"data.root: '{folder}' cannot be read ({error.strerror})") from error
    if not names:
        raise UserError(f"data.root: '{folder}' holds no class folders; {layout}")
    return names


def _image_files(folder: Path, classes: list[str]) -> ImageFiles:
    positions = {name: position for position, name in enumerate(classes)}
    files = make_dataset(folder, positions, IMG_EXTENSIONS, allow_empty=True)
    labels = torch.tensor([label for _, label in files], dtype=torch.int64)
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    empty = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    if empty:
        kinds = " ".join(IMG_EXTENSIONS)
        raise UserError(f"data.root: '{folder}' has class folders without images ({kinds}): {_some(empty)}")
    return ImageFiles(np.array([os.fsencode(path) for path, _ in files]), labels)


@dataclass(frozen=True)
class _Download:
    """What torchvision knows of a set: its class, where it lies below root, the archives, the normalisation."""

    reader: Callable[..., torchvision.datasets.VisionDataset]
    folder: str
    archives_in: str
    archives: tuple[str, ...]
    mean: Channels
    std: Channels


_IDX = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_IDX_ARCHIVES = tuple(f"{name}-ubyte.gz" for name in _IDX)
_DOWNLOADS: dict[str, _Download] = {
    "cifar10": _Download(
        torchvision.datasets.CIFAR10, "cifar-10-batches-py", "", ("cifar-10-python.tar.gz",),
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Download(
        torchvision.datasets.CIFAR100, "cifar-100-python", "", ("cifar-100-python.tar.gz",),
        (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
    ),
    "mnist": _Download(
        torchvision.datasets.MNIST, "MNIST/raw", "MNIST/raw", _IDX_ARCHIVES,
        (0.1307, 0.1307, 0.1307), (0.3081, 0.3081, 0.3081),
    ),
    "fashion_mnist": _Download(
        torchvision.datasets.FashionMNIST, "FashionMNIST/raw", "FashionMNIST/raw", _IDX_ARCHIVES,
        (0.2860, 0.2860, 0.2860), (0.3530, 0.3530, 0.3530),
    ),
}  # fmt: skip


def _torchvision_set(config: DataConfig, seed: int) -> Dataset:
    """Read a set in torchvision's own files, downloading them first if the config says so."""
    known = _DOWNLOADS[config.name]
    root = Path(os.path.expanduser(config.root or ""))
    try:
        splits = [known.reader(root, train=train, download=config.download) for train in (True, False)]
    except (OSError, RuntimeError, ValueError, AssertionError, LookupError, EOFError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        if config.download:
            raise UserError(
                f"data.download: {config.name} could not be downloaded ({reason}); put "
                f"{' '.join(known.archives)} into '{root / known.archives_in}' and run again"
            ) from error
        raise UserError(
            f"data.root: '{root}' has no complete {config.name} (expected in '{root / known.folder}'); "
            "set data.download: true"
        ) from error
    train, val = (_array(_channels_first(np.asarray(split.data)), np.asarray(split.targets)) for split in splits)
    return Dataset(train, val, list(splits[0].classes), known.mean, known.std)


def _npz(config: DataConfig, seed: int) -> Dataset:
    path = Path(os.path.expanduser(config.root or ""))
    arrays = read_npz(path)
    classes: list[str] = arrays["classes"].tolist()
    unseen = sorted(set(range(len(classes))) - set(arrays["y_train"].tolist()))
    if unseen:
        names = _some([classes[label] for label in unseen])
        logger.warning("data.root: '%s': no training image of class %s", path, names)
    train, val = (_array(_channels_first(arrays[f"x_{split}"]), arrays[f"y_{split}"]) for split in ("train", "val"))
    return Dataset(train, val, classes, HALF, HALF)


def _channels_first(images: np.ndarray) -> np.ndarray:
    """Turn (N, H, W) or (N, H, W, C) into (N, C, H, W) without copying."""
    return images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)


def _array(images: np.ndarray, labels: np.ndarray) -> ImageArray:
    return ImageArray(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


def _some(names: list[str], most: int = 5) -> str:
    """List names for a sentence, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


_BUILDERS: dict[str, Callable[[DataConfig, int], Dataset]] = {
    "digits": _digits,
    "imagefolder": _imagefolder,
    "imagenet": _imagenet,
    "cifar10": _torchvision_set,
    "cifar100": _torchvision_set,
    "mnist": _torchvision_set,
    "fashion_mnist": _torchvision_set,
    "npz": _npz,
    "fake": _fake,
}
