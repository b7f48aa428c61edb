"""Data sets of labelled images in memory or files; one picture as model input."""

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from qat.text import first_line
from qat.training.data.transforms import Channels, Picture, Preprocessing, pixels_of
from qat.training.errors import UserError, looked_in, problems_of

HALF: Channels = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ImageArray:
    """Images in memory, uint8 (N, 1 or 3, H, W), and their int64 labels (N,)."""

    images: Tensor
    labels: Tensor

    def picture(self, index: int) -> Tensor:
        return self.images[index]

    def digest(self) -> str:
        """Return a short digest of pixels and labels, to recognize the same images."""
        return _digest(self.labels, self.images.contiguous().numpy().data)

    def subset(self, indices: Tensor) -> "ImageArray":
        return ImageArray(self.images[indices], self.labels[indices])

    def to(self, device: torch.device) -> "ImageArray":
        return ImageArray(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class ImageFiles:
    """Images on disk: their paths, and their int64 labels (N,).

    The paths are one array of bytes. A list of a million strings would be copied into every loader process, because
    reference counts change the memory pages of the strings.
    """

    paths: "np.ndarray[tuple[int], np.dtype[np.bytes_]]"
    labels: Tensor

    def picture(self, index: int) -> Image.Image:
        """Decode one image into 8-bit RGB, as torchvision's ImageFolder does."""
        with problems_of("data.root"):
            return read_picture(os.fsdecode(self.paths[index]))

    def digest(self) -> str:
        """Return a short digest of file names without folders, and of labels."""
        return _digest(self.labels, b"/".join(map(os.path.basename, self.paths.tolist())))

    def subset(self, indices: Tensor) -> "ImageFiles":
        return ImageFiles(self.paths[indices.numpy()], self.labels[indices])


Images: TypeAlias = ImageArray | ImageFiles


@dataclass(frozen=True)
class Dataset:
    """Two splits, the names of their classes, and the normalisation.

    A callable under `data.name` returns it.

    Args:
        train, val: the splits, each with at least one image.
        classes: the name of each label.
        mean, std: per channel, of pixels in [0, 1]; used where the config gives none.

    Raises:
        TypeError: for a split of another type.
        ValueError: for images, labels or channels of another form.

    >>> split = ImageArray(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1, 0]))
    >>> Dataset(split, split, ["cat", "dog"]).std
    (0.5, 0.5, 0.5)
    """

    train: Images
    val: Images
    classes: list[str]
    mean: Channels = HALF
    std: Channels = HALF

    def __post_init__(self) -> None:
        for name, split in (("train", self.train), ("val", self.val)):
            _check_split(f"Dataset: {name}", split, len(self.classes))
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"Dataset: mean and std must be 3 numbers, std > 0, got {self.mean} and {self.std}")


def _check_split(where: str, split: Images, classes: int) -> None:
    if not isinstance(split, ImageArray | ImageFiles):
        raise TypeError(f"{where} must be an ImageArray or an ImageFiles, got {type(split).__name__}")
    content: object  # a user's code may give anything
    if isinstance(split, ImageArray):
        content, form = split.images, "images must be a uint8 tensor (N, 1 or 3, H, W)"
        fits = isinstance(content, Tensor) and content.dtype is torch.uint8
        fits = fits and content.dim() == 4 and content.shape[1] in (1, 3)
    else:
        content, form = split.paths, "paths must be an array of bytes (N,)"
        fits = isinstance(content, np.ndarray) and content.dtype.kind == "S"
    if not fits:
        raise ValueError(f"{where}: {form}, got {_described(content)}")
    count, labels = len(content), split.labels
    if count == 0:
        raise ValueError(f"{where} has no images")
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(f"{where}: labels must be an int64 tensor ({count},), got {_described(labels)}")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= classes:
        raise ValueError(f"{where}: labels go from {lowest} to {highest}, but classes has length {classes}")


def _described(value: object) -> str:
    shape = f" {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
    return f"{type(value).__name__}{shape}"


def _digest(labels: Tensor, content: "bytes | memoryview[int]") -> str:
    digest = hashlib.sha256(labels.contiguous().numpy().data)
    digest.update(content)
    return digest.hexdigest()[:16]


GivenPicture: TypeAlias = "str | os.PathLike[str] | Image.Image | np.ndarray | Tensor"


def read_picture(path: "str | os.PathLike[str]") -> Image.Image:
    """Decode one image into 8-bit RGB as torchvision's ImageFolder does, but upright."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of broken EXIF data and transparent palettes; the pixels are readable.
            warnings.simplefilter("ignore", UserWarning)
            with Image.open(path) as image:
                return as_rgb(image, f"'{path}'")
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"'{path}' does not exist{looked_in(Path(path))}") from None
    except Exception as error:  # for damaged files, Pillow raises different errors from format to format
        known = isinstance(error, OSError) and error.strerror
        what = "no known format" if isinstance(error, UnidentifiedImageError) else known or first_line(error)
        raise UserError(f"'{path}' is not a readable image ({what}); repair or remove it") from error


def as_rgb(image: Image.Image, where: str) -> Image.Image:
    """Return the image in 8-bit RGB, turned upright as its EXIF data says."""
    if image.mode.startswith(("I", "F")):
        raise UserError(f"{where} has pixels of mode '{image.mode}'; save it with 8 bits a channel")
    upright = image.convert("RGB")
    ImageOps.exif_transpose(upright, in_place=True)
    return upright


@dataclass(frozen=True)
class InputTransform:
    """Preprocessing of a picture, exactly as in the validation of the training.

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
        try:
            return self.preprocessing.apply(self._as_stored(picture)).unsqueeze(0)
        except UserError as error:
            raise ValueError(f"transform: {error}") from None

    def _as_stored(self, picture: GivenPicture) -> Picture:
        from_files = self.preprocessing.resized_by == "pillow"
        if isinstance(picture, Image.Image | str | os.PathLike):
            image = as_rgb(picture, "the image") if isinstance(picture, Image.Image) else read_picture(picture)
            return image if from_files else pixels_of(image)
        if not isinstance(picture, np.ndarray | Tensor):
            raise TypeError(
                f"transform: expected a path, a PIL image, or a uint8 array or tensor, got {type(picture).__name__}"
            )
        pixels = torch.tensor(picture) if isinstance(picture, np.ndarray) else picture.cpu()
        if isinstance(picture, np.ndarray):
            pixels = pixels[None] if pixels.dim() == 2 else pixels.movedim(-1, 0)
        if pixels.dtype != torch.uint8 or pixels.dim() != 3 or pixels.shape[0] not in (1, 3) or not pixels.numel():
            raise UserError(
                "expected a uint8 array (H, W) or (H, W, 1 or 3), or a uint8 tensor (1 or 3, H, W), got"
                f" {picture.dtype} {tuple(picture.shape)}"
            )
        if not from_files:
            return pixels
        return Image.fromarray(np.ascontiguousarray(pixels.expand(3, -1, -1).permute(1, 2, 0)))
