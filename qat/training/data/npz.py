"""A data set in one .npz file, read without unpickling."""

from pathlib import Path

import numpy as np
import torch

from qat.text import first_line
from qat.training.data.images import Dataset, ImageArray
from qat.training.errors import UserError, looked_in, value_errors_reported

NEEDED = ("x_train", "y_train", "x_val", "y_val")


def read_npz(path: Path) -> Dataset:
    """Read x_train, x_val: uint8 images (N, H, W), (N, H, W, 1) or (N, H, W, 3); y_train, y_val: integer labels (N,);
    and classes, their names; without these, the numbers up to the largest label in y_train.
    """
    where = f"data.root: '{path}'"
    if not path.is_file():
        raise UserError(f"{where} is not a file{looked_in(path)}; it must be an .npz with {', '.join(NEEDED)}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in (*NEEDED, "classes") if name in archive}
    except Exception as error:  # for a damaged archive, zipfile, zlib and NumPy raise different errors
        raise UserError(f"{where} is not an .npz of plain arrays ({first_line(error)})") from error
    absent = [name for name in NEEDED if name not in arrays]
    if absent:
        raise UserError(f"{where} has no {', '.join(absent)}")
    with value_errors_reported(f"{where}: "):
        train, val = (array(arrays[f"x_{name}"], arrays[f"y_{name}"]) for name in ("train", "val"))
        numbers = np.arange(arrays["y_train"].max(initial=0) + 1)
        classes = arrays.get("classes", numbers).astype(str).tolist()
        return Dataset(train, val, classes)


def array(images: np.ndarray, labels: np.ndarray) -> ImageArray:
    """Images (N, H, W) or (N, H, W, C), and labels, without copying the images."""
    if images.ndim not in (3, 4) or labels.dtype.kind not in "iu":
        raise ValueError(
            f"images must be (N, H, W) or (N, H, W, C) and labels integers, got {images.shape} and {labels.dtype}"
        )
    first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return ImageArray(torch.from_numpy(first), torch.from_numpy(labels.astype(np.int64)))
