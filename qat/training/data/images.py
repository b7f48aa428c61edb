"""Where a split's images lie: in memory (`ImageArray`) or in files (`ImageFiles`), which are decoded one by one."""

import os
import warnings
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from qat.training.errors import UserError


@dataclass(frozen=True)
class ImageArray:
    """Images in memory: uint8 (N, C, H, W) with 1 or 3 channels, and their int64 labels (N,)."""

    images: Tensor
    labels: Tensor

    def picture(self, index: int) -> Tensor:
        """Return one image, uint8 (C, H, W)."""
        return self.images[index]

    def subset(self, indices: Tensor) -> "ImageArray":
        """Return these images only, in this order."""
        return ImageArray(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class ImageFiles:
    """Images on disk: their paths, and their int64 labels (N,).

    The paths are one array of bytes: a list of a million strings is copied into every loader process as soon as the
    process counts references to them.
    """

    paths: "np.ndarray[tuple[int], np.dtype[np.bytes_]]"
    labels: Tensor

    def picture(self, index: int) -> Image.Image:
        """Decode one image; raises UserError if the file is not a readable image."""
        return read_image(os.fsdecode(self.paths[index]))

    def subset(self, indices: Tensor) -> "ImageFiles":
        """Return these images only, in this order."""
        return ImageFiles(self.paths[indices.numpy()], self.labels[indices])


Images: TypeAlias = ImageArray | ImageFiles


def read_image(path: str) -> Image.Image:
    """Decode the image file at `path` into 8-bit RGB, as torchvision's ImageFolder does.

    Raises:
        UserError: the file is no image, is damaged, or has more than 8 bits a channel.
    """
    try:
        with warnings.catch_warnings():
            # Broken EXIF and transparent palettes: the pixels are readable all the same.
            warnings.simplefilter("ignore", UserWarning)
            with Image.open(path) as image:
                if not image.mode.startswith(("I", "F")):
                    picture: Image.Image = image.convert("RGB")
                    return picture
                mode = image.mode
    except Exception as error:  # what Pillow raises for damaged files differs from format to format
        reason = _reason(error)
        raise UserError(f"data.root: '{path}' is not a readable image ({reason}); repair or remove it") from error
    # Pillow would clip these values to 255.
    raise UserError(f"data.root: '{path}' has pixels of mode '{mode}'; save it with 8 bits a channel")


def _reason(error: Exception) -> str:
    """Say in a few words what is wrong with a file, without repeating its path."""
    if isinstance(error, UnidentifiedImageError):
        return "no known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]
