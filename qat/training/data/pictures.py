"""One picture: decoded from a file, or in the hands of a program that uses a trained model."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from qat.text import first_line
from qat.training.data.transforms import Picture, Preprocessing, pixels_of
from qat.training.errors import UserError, looked_in

GivenPicture: TypeAlias = "str | os.PathLike[str] | Image.Image | np.ndarray | Tensor"


def read_picture(path: "str | os.PathLike[str]") -> Image.Image:
    """Decode one image into 8-bit RGB, as torchvision's ImageFolder does: an orientation in EXIF is ignored."""
    try:
        with warnings.catch_warnings():
            # The pixels are readable despite broken EXIF data or a transparent palette.
            warnings.simplefilter("ignore", UserWarning)
            with Image.open(path) as image:
                return as_rgb(image, f"'{path}'")
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"'{path}' does not exist{looked_in(Path(path))}") from None
    except Exception as error:  # for damaged files, Pillow raises different errors from format to format
        raise UserError(f"'{path}' is not a readable image ({_reason(error)}); repair or remove it") from error


def as_rgb(image: Image.Image, where: str) -> Image.Image:
    """The image in 8-bit RGB."""
    if image.mode.startswith(("I", "F")):
        raise UserError(f"{where} has pixels of mode '{image.mode}'; save it with 8 bits a channel")
    return image.convert("RGB")


@dataclass(frozen=True)
class InputTransform:
    """A picture as the model's input: exactly what the validation of the model's training feeds it.

    Call it with a path, a PIL image, a uint8 array (H, W) or (H, W, 1 or 3), or a uint8 tensor (1 or 3, H, W). The
    result is a float32 tensor (1, 3, image_size, image_size) on the CPU. It can be pickled, for a loader's processes.

    Raises:
        ValueError: for a file that is not a readable image, or pixels of another form.
        TypeError: for something else.

    >>> transform = InputTransform(Preprocessing(32, 36, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)))
    >>> transform(np.full((48, 64, 3), 255, np.uint8)).shape
    torch.Size([1, 3, 32, 32])
    """

    preprocessing: Preprocessing

    def __call__(self, picture: GivenPicture) -> Tensor:
        """Resize, crop and normalise one picture."""
        try:
            return self.preprocessing.apply(self._as_stored(picture)).unsqueeze(0)
        except UserError as error:
            raise ValueError(f"transform: {error}") from None

    def _as_stored(self, picture: GivenPicture) -> Picture:
        """The picture as the data set had it: as a PIL image from a file, or as a tensor from a set in memory."""
        from_files = self.preprocessing.resized_by == "pillow"
        if isinstance(picture, Image.Image | str | os.PathLike):
            image = as_rgb(picture, "the image") if isinstance(picture, Image.Image) else read_picture(picture)
            return image if from_files else pixels_of(image)
        if not isinstance(picture, np.ndarray | Tensor):
            raise TypeError(
                f"transform: expected a path, a PIL image, or a uint8 array or tensor, got {type(picture).__name__}"
            )
        pixels = _channels_first(picture)
        if not from_files:
            return pixels
        return Image.fromarray(np.ascontiguousarray(pixels.expand(3, -1, -1).permute(1, 2, 0)))


def _channels_first(picture: "np.ndarray | Tensor") -> Tensor:
    """A uint8 array (H, W) or (H, W, 1 or 3), or a uint8 tensor (1 or 3, H, W), as such a tensor on the CPU."""
    pixels = torch.tensor(picture) if isinstance(picture, np.ndarray) else picture.cpu()
    if isinstance(picture, np.ndarray):
        pixels = pixels[None] if pixels.dim() == 2 else pixels.movedim(-1, 0)
    if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[0] not in (1, 3) or not pixels.numel():
        raise UserError(
            "expected a uint8 array (H, W) or (H, W, 1 or 3), or a uint8 tensor (1 or 3, H, W), got"
            f" {picture.dtype} {tuple(picture.shape)}"
        )
    return pixels


def _reason(error: Exception) -> str:
    """Describe in a few words what is wrong with a file, without its path."""
    if isinstance(error, UnidentifiedImageError):
        return "no known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
