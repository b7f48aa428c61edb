"""A data set in folders, root/train/<class>/ and root/val/<class>/: the list of its files and their labels.

As in torchvision's ImageFolder, links are followed. Names that begin with a dot (.ipynb_checkpoints, macOS's ._1.png)
are skipped, and what cannot be read is an error.
"""

import os
from pathlib import Path

import numpy as np
import torch

from qat.training.data.images import ImageFiles
from qat.training.errors import UserError, looked_in

SPLITS = ("train", "val")

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Of images, as in torchvision's ImageFolder."""


def read_image_folder(root: Path) -> tuple[dict[str, ImageFiles], list[str]]:
    """List the images of both splits, by the name of the split, and the names of the classes."""
    try:
        found = {split: _class_folders(root / split) for split in SPLITS}
        classes = found["train"]
        differing = sorted({*classes} ^ {*found["val"]})
        if differing:
            raise UserError(f"data.root: '{root}': train and val need the same classes; they differ in {differing[:5]}")
        return {split: _image_files(root / split, classes) for split in SPLITS}, classes
    except OSError as error:
        raise UserError(
            f"data.root: '{error.filename}' cannot be read ({error.strerror}){looked_in(root)}; expected"
            f" {root}/train/<class>/ and {root}/val/<class>/"
        ) from error


def _class_folders(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise UserError(f"data.root: '{folder}' holds no class folders")
    return names


def _image_files(folder: Path, classes: list[str]) -> ImageFiles:
    """List a split's images by class, then by folder and name."""
    found = [_images_below(folder / name) for name in classes]
    empty = [name for name, paths in zip(classes, found, strict=True) if not paths]
    if empty:
        kinds = " ".join(EXTENSIONS)
        raise UserError(f"data.root: '{folder}' has class folders without images ({kinds}): {', '.join(empty[:5])}")
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(paths) for paths in found]))
    return ImageFiles(np.array([os.fsencode(path) for paths in found for path in paths]), labels)


def _images_below(folder: Path) -> list[str]:
    def fail(error: OSError) -> None:
        raise error

    paths: list[str] = []
    for place, subfolders, files in os.walk(folder, onerror=fail, followlinks=True):
        subfolders[:] = [name for name in subfolders if name[0] != "."]  # os.walk then leaves the others out
        for link in (Path(place, name) for name in subfolders if os.path.islink(os.path.join(place, name))):
            if link.resolve() in (folder.resolve(), *folder.resolve().parents):
                raise UserError(f"data.root: '{link}' is a link that leads back up to '{link.resolve()}'; remove it")
        paths += [os.path.join(place, name) for name in files if name[0] != "." and name.lower().endswith(EXTENSIONS)]
    return sorted(paths, key=os.path.split)
