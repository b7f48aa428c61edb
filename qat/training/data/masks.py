"""Folders of images and masks, and transforms that move an image and its mask together."""

from pathlib import Path

import torch
from torch import Tensor

from qat.training.config.schema import AugmentConfig
from qat.training.data.images import MaskFiles, paths_of
from qat.training.data.transforms import Picture, Preprocessing, ToInput
from qat.training.errors import UserError, reading
from qat.training.tasks.labels import IGNORED

WITHOUT_MASKS = ("trivial_augment", "random_erasing", "cutout")
"""Augmentations that would leave the mask where it was, or label what is erased."""

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def read_mask_folder(root: Path) -> tuple[dict[str, MaskFiles], list[str]]:
    """List the images and masks of both splits, and read the names of the classes."""
    named = root / "classes.txt"
    folders = f"{root}/train/images, {root}/train/masks, {root}/val/images, {root}/val/masks"
    with reading(f"'{named}'", f"the name of each class on a line, and {folders}"):
        classes = [line.strip() for line in named.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if len(classes) < 2:
        raise UserError(f"data.root: '{named}' names {len(classes)} classes; it needs 2 or more, a line each")
    return {split: _masked(root / split, len(classes)) for split in ("train", "val")}, classes


def _masked(folder: Path, classes: int) -> MaskFiles:
    with reading(f"'{folder}'", "the folders images and masks"):
        images, masks = (
            {path.stem: path for path in sorted((folder / name).iterdir()) if path.suffix.lower() in SUFFIXES}
            for name in ("images", "masks")
        )
    if lonely := sorted({*images} ^ {*masks}):
        kind = "mask" if lonely[0] in images else "image"
        raise UserError(f"data.root: '{folder}': {len(lonely)} files have no partner; {lonely[0]} has no {kind}")
    if not images:
        raise UserError(f"data.root: '{folder / 'images'}' holds no images ({' '.join(SUFFIXES)})")
    return MaskFiles(paths_of(images.values()), paths_of(masks[name] for name in images), classes)


class MaskedTransform:
    """Crop and augmentation of an image and its mask together, and normalization of the image."""

    def __init__(self, augment: AugmentConfig, plain: Preprocessing) -> None:
        from torchvision import tv_tensors
        from torchvision.transforms import InterpolationMode, v2  # late, since it takes seconds

        if wrong := [name for name in WITHOUT_MASKS if getattr(augment, name)]:
            raise UserError(f"data.augment.{wrong[0]}: has no meaning for masks; leave it out")
        size, padding = plain.image_size, augment.crop_padding
        fill = {tv_tensors.Mask: IGNORED, "others": 0}
        steps: list[torch.nn.Module] = [
            v2.RandomResizedCrop(size) if augment.random_resized_crop else v2.Resize(plain.resize_size),
            v2.RandomCrop(size, padding=padding, fill=fill) if padding else v2.CenterCrop(size),
        ]
        if augment.horizontal_flip:
            steps.append(v2.RandomHorizontalFlip(augment.horizontal_flip))
        if augment.affine:
            moves = {"translate": (0.1, 0.1), "scale": (0.9, 1.1), "interpolation": InterpolationMode.BILINEAR}
            steps.append(v2.RandomAffine(10, **moves, fill=fill))
        self.geometry, self.normalise = v2.Compose(steps), ToInput(plain.mean, plain.std)

    def __call__(self, picture: Picture, mask: Tensor) -> tuple[Tensor, Tensor]:
        from torchvision import tv_tensors

        moved, labels = self.geometry(picture, tv_tensors.Mask(mask))
        return self.normalise(moved), labels.as_subclass(Tensor).long()
