"""A data set in folders, root/train/<class>/ and root/val/<class>/: the list of its files and their labels.

Links are followed, as in torchvision's ImageFolder. A link to a parent folder would put the images of all classes into
one class, and a file in two classes would have two labels: both are refused, as is a folder that cannot be read. A file
under two names in one class counts twice, because links are a way to balance classes. Names that begin with a dot
(.ipynb_checkpoints, macOS's ._1.png) are skipped.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from qat.training.data.images import ImageFiles
from qat.training.errors import UserError, looked_in

logger = logging.getLogger("qat")

SPLITS = ("train", "val")

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Of images, as in torchvision's ImageFolder."""

_Place = tuple[int, int]
"""Device and inode of a file, which all links to it share."""

_First = tuple[str, int, str]
"""Path, label and split of the first name under which a file was found."""


def read_image_folder(root: Path) -> tuple[dict[str, ImageFiles], list[str]]:
    """List the images of both splits, by the name of the split, and the names of the classes.

    Raises:
        UserError: for folders that are missing, empty or unreadable, classes that differ between the splits, a link to
            a parent folder or to nothing, or a file with two labels.
    """
    layout = f"expected {root}/train/<class>/ and {root}/val/<class>/"
    if not root.is_dir():
        raise UserError(f"data.root: '{root}' is not a folder{looked_in(root)}; {layout}")
    absent = [name for name in SPLITS if not (root / name).is_dir()]
    if absent:
        raise UserError(f"data.root: '{root}' has no folder {' and no folder '.join(absent)}; {layout}")
    classes = _class_folders(root / "train", layout)
    val_classes = _class_folders(root / "val", layout)
    differing = [
        f"only in {name}: {first_few(sorted(set(these) - set(those)))}"
        for name, these, those in (("train", classes, val_classes), ("val", val_classes, classes))
        if set(these) - set(those)
    ]
    if differing:
        raise UserError(f"data.root: '{root}': train and val need the same class folders; {'; '.join(differing)}")
    seen: dict[_Place, _First] = {}
    return {split: _image_files(root / split, split, classes, seen) for split in SPLITS}, classes


def first_few(names: list[str], most: int = 5) -> str:
    """List names for a sentence; of many, only the first few."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _class_folders(folder: Path, layout: str) -> list[str]:
    """Return the sorted names of a split's class folders, without hidden ones (.ipynb_checkpoints)."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    except OSError as error:
        raise UserError(f"data.root: '{folder}' cannot be read ({error.strerror})") from error
    if not names:
        raise UserError(f"data.root: '{folder}' holds no class folders; {layout}")
    return names


def _image_files(folder: Path, split: str, classes: list[str], seen: dict[_Place, _First]) -> ImageFiles:
    """List a split's images by class, then by folder and name, and note in `seen` where each file was found first."""
    paths: list[str] = []
    counts: list[int] = []
    shared: list[str] = []
    for label, name in enumerate(classes):
        found = sorted(_walk(str(folder / name), _parents(folder)), key=lambda file: os.path.split(file[0]))
        for path, place in found:
            first = seen.setdefault(place, (path, label, split))
            # Some file systems give all entries of a listing the same inode, so compare the files themselves.
            if first[0] != path and os.path.samefile(first[0], path):
                if first[1] != label:
                    raise UserError(
                        f"data.root: '{first[0]}' and '{path}' are one file in two classes; remove one of them"
                    )
                shared += [path] if first[2] != split else []
        paths += [path for path, _ in found]
        counts.append(len(found))
    if shared:
        logger.warning("data.root: %d images of %s are images of train too ('%s' first)", len(shared), split, shared[0])
    empty = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    if empty:
        kinds = " ".join(EXTENSIONS)
        raise UserError(f"data.root: '{folder}' has class folders without images ({kinds}): {first_few(empty)}")
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor(counts))
    return ImageFiles(np.array([os.fsencode(path) for path in paths]), labels)


def _walk(folder: str, above: frozenset[str]) -> Iterator[tuple[str, _Place]]:
    """Yield the images below a folder with their places; `above` are the real paths of the folder's parents."""
    real = os.path.realpath(folder)
    if real in above:
        raise UserError(f"data.root: '{folder}' is a link that leads back up to '{real}'; remove it")
    try:
        device = os.stat(folder).st_dev
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name[0] == ".":
                    continue
                if entry.is_dir():
                    yield from _walk(entry.path, above | {real})
                elif entry.name.lower().endswith(EXTENSIONS):
                    yield entry.path, _place(entry, device)
    except OSError as error:
        where = error.filename or folder
        raise UserError(f"data.root: '{where}' cannot be read ({error.strerror}); repair or remove it") from error


def _place(entry: "os.DirEntry[str]", device: int) -> _Place:
    """Take the inode from the folder's listing where possible: a stat of each of a million files would be slow."""
    if not entry.is_symlink():
        return device, entry.inode()
    found = os.stat(entry.path)
    return found.st_dev, found.st_ino


def _parents(folder: Path) -> frozenset[str]:
    real = Path(os.path.realpath(folder))
    return frozenset(map(str, (real, *real.parents)))
