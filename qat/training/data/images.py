"""Data sets of labelled images in memory or files; one picture as model input."""

import hashlib
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from qat.text import first_line
from qat.training.data.transforms import Channels, Picture, Preprocessing, pixels_of
from qat.training.errors import UserError, looked_in, problems_of
from qat.training.tasks.labels import IGNORED
from qat.training.tasks.task import Kind

HALF: Channels = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ImageArray:
    """Images in memory, uint8 (N, 1 or 3, H, W), and their int64 labels (N,), uint8 masks (N, H, W) or boxes."""

    images: Tensor
    labels: Tensor  # boxes are float32 (N, M, 6): rows as in `BoxFiles`, padded with rows of label -1

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def kind(self) -> Kind:
        """What the labels are."""
        return "labels" if self.labels.dim() == 1 else "boxes" if self.labels.is_floating_point() else "masks"

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        labels = self.labels[index]
        return self.images[index], labels[labels[:, 0] >= 0] if self.kind == "boxes" else labels

    def digest(self) -> str:
        """Return a short digest of pixels and labels, to recognize the same images."""
        return digest_of(self.labels.contiguous().numpy().data, self.images.contiguous().numpy().data)

    def subset(self, indices: Tensor) -> "ImageArray":
        return ImageArray(self.images[indices], self.labels[indices])

    def to(self, device: torch.device) -> "ImageArray":
        return ImageArray(self.images.to(device), self.labels.to(device))


Paths: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.bytes_]]"


def paths_of(names: Iterable[str | Path]) -> Paths:
    """Return paths as one array of bytes.

    A list of a million strings would be copied into every loader process, because reference counts change the memory
    pages of the strings.
    """
    return np.array([os.fsencode(name) for name in names])


def _names(paths: Paths) -> bytes:
    return b"/".join(map(os.path.basename, paths.tolist()))


@dataclass(frozen=True)
class Files:
    """Base of the splits on disk, whose images are decoded one by one."""

    paths: Paths

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class ImageFiles(Files):
    """Images on disk: their paths, and their int64 labels (N,)."""

    labels: Tensor
    kind: ClassVar[Kind] = "labels"

    def sample(self, index: int) -> tuple[Image.Image, Tensor]:
        """Decode one image into 8-bit RGB, as torchvision's ImageFolder does; return its label too."""
        with problems_of("data.root"):
            return read_picture(os.fsdecode(self.paths[index])), self.labels[index]

    def digest(self) -> str:
        """Return a short digest of file names without folders, and of labels."""
        return digest_of(self.labels.contiguous().numpy().data, _names(self.paths))

    def subset(self, indices: Tensor) -> "ImageFiles":
        return ImageFiles(self.paths[indices.numpy()], self.labels[indices])


@dataclass(frozen=True)
class MaskFiles(Files):
    """Images and masks on disk; a mask is an image of class numbers."""

    masks: Paths
    classes: int
    kind: ClassVar[Kind] = "masks"

    def sample(self, index: int) -> tuple[Image.Image, Tensor]:
        """Decode one image into 8-bit RGB, and its mask: uint8 (H, W), of the image's size."""
        path = os.fsdecode(self.masks[index])
        with problems_of("data.root"):
            picture = read_picture(os.fsdecode(self.paths[index]))
            try:
                with Image.open(path) as opened:
                    mask = torch.from_numpy(np.array(opened))
            except Exception as error:  # for damaged files, Pillow raises different errors from format to format
                raise UserError(f"'{path}' is not a readable mask ({first_line(error)}); repair it") from error
            if mask.dim() != 2 or mask.dtype != torch.uint8:
                form = f"{mask.dtype} {tuple(mask.shape)}"
                raise UserError(f"'{path}' has pixels {form}; a mask has one number of 8 bits a pixel, its class")
            if picture.size != (mask.shape[1], mask.shape[0]):
                raise UserError(f"'{path}' is of {mask.shape[1]} x {mask.shape[0]} pixels, its image of {picture.size}")
            if (unknown := mask[(mask >= self.classes) & (mask != IGNORED)]).numel():
                what = f"there are {self.classes}, from 0 on, and {IGNORED} for pixels that do not count"
                raise UserError(f"'{path}' has the class {int(unknown[0])}; {what}")
        return picture, mask

    def digest(self) -> str:
        return digest_of(_names(self.paths), _names(self.masks))

    def subset(self, indices: Tensor) -> "MaskFiles":
        return MaskFiles(self.paths[indices.numpy()], self.masks[indices.numpy()], self.classes)


@dataclass(frozen=True)
class BoxFiles(Files):
    """Images on disk, and the boxes of their objects.

    A row is an object: label (from 1 on; 0 is the background), x1, y1, x2, y2 in pixels, and 1 for what counts neither
    as found nor as missed (COCO's crowds, VOC's difficult ones), else 0.
    """

    rows: Tensor  # float32 (T, 6), of all images in their order
    ends: Tensor  # int64 (N,): an image has the rows from the end before to its own
    classes: int
    shares: bool = False  # coordinates are shares of width and height
    kind: ClassVar[Kind] = "boxes"

    def sample(self, index: int) -> tuple[Image.Image, Tensor]:
        """Decode one image into 8-bit RGB, and return its objects: float32 (n, 6), in pixels."""
        path = os.fsdecode(self.paths[index])
        with problems_of("data.root"):
            picture, rows = read_picture(path), self._rows(index).clone()
            sides = torch.tensor(picture.size * 2)
            rows[:, 1:5] = (rows[:, 1:5] * sides if self.shares else rows[:, 1:5]).clamp(min=0).minimum(sides)
            if (rows[:, 3:5] <= rows[:, 1:3]).any():
                raise UserError(f"'{path}' is of {sides[0]} x {sides[1]} pixels, and has a box outside; correct it")
        return picture, rows

    def digest(self) -> str:
        return digest_of(self.rows.contiguous().numpy().data, self.ends.contiguous().numpy().data, _names(self.paths))

    def subset(self, indices: Tensor) -> "BoxFiles":
        rows = [self._rows(index) for index in indices.tolist()]
        ends = torch.tensor([len(each) for each in rows]).cumsum(0)
        return BoxFiles(self.paths[indices.numpy()], torch.cat(rows), ends, self.classes, self.shares)

    def _rows(self, index: int) -> Tensor:
        return self.rows[self.ends[index - 1] if index else 0 : self.ends[index]]


Images: TypeAlias = ImageArray | ImageFiles | MaskFiles | BoxFiles


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
            if split.kind == "boxes" and self.classes[0] != "background":
                raise ValueError(f"Dataset: classes[0] must be 'background' for boxes, got {self.classes[0]!r}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"Dataset: mean and std must be 3 numbers, std > 0, got {self.mean} and {self.std}")


def _check_split(where: str, split: Images, classes: int) -> None:
    if not isinstance(split, Images):
        raise TypeError(f"{where} must be an ImageArray, ImageFiles, MaskFiles or BoxFiles, got {type(split).__name__}")
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
    count = len(content)
    if count == 0:
        raise ValueError(f"{where} has no images")
    if isinstance(split, MaskFiles):  # each is looked at when it is read
        return
    if isinstance(split, BoxFiles):
        if split.ends.shape != (count,) or split.ends[-1] != len(split.rows):
            form = f"an int64 tensor ({count},) whose last is {len(split.rows)}, the number of rows"
            raise ValueError(f"{where}: ends must be {form}, got {_described(split.ends)}")
        return _check_boxes(where, split.rows, classes)
    labels, masks = split.labels, isinstance(split, ImageArray) and content.shape[:1] + content.shape[2:]
    known = isinstance(labels, Tensor)
    if known and masks and labels.is_floating_point() and labels.dim() == 3 and len(labels) == count:
        return _check_boxes(where, labels.flatten(0, 1)[labels.flatten(0, 1)[:, 0] != -1], classes)
    if known and masks and labels.dtype == torch.uint8 and labels.shape == masks:
        labels = labels[labels != IGNORED].long()
    elif not known or labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(
            f"{where}: labels must be an int64 tensor ({count},){' or masks or boxes of the images' * bool(masks)}, got"
            f" {_described(labels)}"
        )
    lowest, highest = (int(labels.min()), int(labels.max())) if labels.numel() else (0, 0)
    if lowest < 0 or highest >= classes:
        raise ValueError(f"{where}: labels go from {lowest} to {highest}, but classes has length {classes}")


def _check_boxes(where: str, rows: Tensor, classes: int) -> None:
    if rows.dtype != torch.float32 or rows.shape[1:] != (6,):
        raise ValueError(f"{where}: boxes must be float32 rows of 6 numbers, got {_described(rows)}")
    fits = (rows[:, 0] >= 1) & (rows[:, 0] < classes) & (rows[:, 3:5] > rows[:, 1:3]).all(1) & rows.isfinite().all(1)
    if wrong := rows[~fits].tolist():
        form = f"label from 1 to {classes - 1}, x1, y1, x2 > x1, y2 > y1, crowd"
        raise ValueError(f"{where}: a box must be {form}, got {wrong[0]}")


def _described(value: object) -> str:
    shape = f" {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
    return f"{type(value).__name__}{shape}"


def digest_of(*contents: "bytes | memoryview[int]") -> str:
    """Return a short digest of bytes."""
    digest = hashlib.sha256()
    for content in contents:
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
