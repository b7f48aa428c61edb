"""A data set in one .npz file, read without unpickling; all arrays are checked before they are used."""

import zipfile
from pathlib import Path

import numpy as np

from qat.text import first_line
from qat.training.errors import UserError, looked_in

NEEDED = ("x_train", "y_train", "x_val", "y_val")

MOST_CLASSES = 100_000
"""Most classes of a file without class names. A larger label is not a class, but an identity or a damaged byte."""


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of the file at `path`.

    Returns:
        x_train, x_val: uint8 images (N, H, W), (N, H, W, 1) or (N, H, W, 3), N at least 1.
        y_train, y_val: integer labels (N,), each below the number of classes.
        classes: the names of the classes; without them in the file, the numbers up to the largest label in y_train.

    Raises:
        UserError: if the file is missing or not an .npz, or arrays are missing or malformed; it lists all problems.
    """
    arrays = _load(path)
    where = f"data.root: '{path}'"
    problems = [
        problem
        for split in ("train", "val")
        for problem in _split_problems(arrays[f"x_{split}"], arrays[f"y_{split}"], split)
    ]
    classes = arrays.get("classes")
    if classes is not None and (classes.ndim != 1 or classes.dtype.kind != "U"):
        problems.append(f"classes is {classes.dtype} {classes.shape}; it must be one string a class")
    if problems:
        raise UserError(*(f"{where}: {problem}" for problem in problems))
    source = "y_train" if classes is None else "classes"
    if classes is None:
        largest = int(arrays["y_train"].max())
        if largest >= MOST_CLASSES:
            raise UserError(
                f"{where}: y_train has label {largest}; without an array 'classes' labels go from 0 to"
                f" {MOST_CLASSES - 1}, and every number up to the largest is a class"
            )
        classes = arrays["classes"] = np.arange(largest + 1).astype(str)
    for name in ("y_train", "y_val"):
        if arrays[name].max() >= len(classes):
            raise UserError(
                f"{where}: {name} has label {arrays[name].max()}; by {source} labels go from 0 to {len(classes) - 1}"
            )
    return arrays


def _load(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise UserError(
            f"data.root: '{path}' is not a file{looked_in(path)}; data.name 'npz' reads {', '.join(NEEDED)} from one"
            " .npz"
        )
    if not zipfile.is_zipfile(path):  # np.load also reads a single .npy array
        raise UserError(f"data.root: '{path}' is not an .npz archive")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in (*NEEDED, "classes") if name in archive}
            found = ", ".join(archive.files) or "nothing"
    except Exception as error:  # for a damaged archive, zipfile, zlib and NumPy raise different errors, MemoryError too
        raise UserError(f"data.root: '{path}' is not an .npz of plain arrays ({first_line(error)})") from error
    absent = [name for name in NEEDED if name not in arrays]
    if absent:
        raise UserError(f"data.root: '{path}' has no {', '.join(absent)}; it holds {found}")
    return arrays


def _split_problems(images: np.ndarray, labels: np.ndarray, split: str) -> list[str]:
    """Describe what is wrong with one split's arrays; the list is empty if nothing is."""
    problems = []
    shape = images.shape
    if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and shape[3] in (1, 3))):
        problems.append(f"x_{split} is {images.dtype} {shape}; it must be uint8 (N, H, W) or (N, H, W, 1 or 3)")
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        problems.append(f"y_{split} is {labels.dtype} {labels.shape}; it must be integers (N,)")
    if problems:
        return problems
    if images.size == 0:
        return [f"x_{split} is empty {shape}"]
    if len(labels) != len(images):
        return [f"x_{split} has {len(images)} images, y_{split} has {len(labels)} labels"]
    return [f"y_{split} has label {labels.min()}; labels count from 0"] if labels.min() < 0 else []
