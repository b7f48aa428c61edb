"""Folders of images: which files are listed, with which label, through links too."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from qat.training.data.datasets import read_image_folder
from qat.training.data.images import ImageFiles, as_rgb
from tests.runs.tiny_training import user_error


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two images per class and split; the tests only read their names."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "set" / split / name).mkdir(parents=True)
            for number in range(2):
                (tmp_path / "set" / split / name / f"{number}.png").write_bytes(b"")
    return tmp_path / "set"


def listed(root: Path, split: str = "train") -> list[tuple[str, int]]:
    files = read_image_folder(root)[0][split]
    return [
        (os.path.relpath(os.fsdecode(path), root / split), int(label))
        for path, label in zip(files.paths, files.labels, strict=True)
    ]


def test_files_come_by_class_then_folder_then_name_through_links_and_without_what_is_hidden(
    root: Path, tmp_path: Path
) -> None:
    cat = root / "train" / "cat"
    for name in ("a/b/5.JPG", "notes.txt", ".ipynb_checkpoints/0-checkpoint.png", "a/.thumbs/1.png", "._0.png"):
        (cat / name).parent.mkdir(parents=True, exist_ok=True)
        (cat / name).write_bytes(b"")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "7.png").write_bytes(b"")
    (cat / "more").symlink_to(tmp_path / "more")
    (cat / "8.png").symlink_to(tmp_path / "more" / "7.png")  # twice under one label: harmless
    (root / "train" / "dog").rename(tmp_path / "dogs")
    (root / "train" / "dog").symlink_to(tmp_path / "dogs")
    assert listed(root) == [
        ("cat/0.png", 0), ("cat/1.png", 0), ("cat/8.png", 0), ("cat/a/b/5.JPG", 0), ("cat/more/7.png", 0),
        ("dog/0.png", 1), ("dog/1.png", 1),
    ]  # fmt: skip


def test_a_link_that_leads_back_up_is_refused(root: Path) -> None:
    link = root / "train" / "cat" / "up"
    link.symlink_to("..")
    assert f"'{link}' is a link that leads back up to '{root}/train'" in user_error(read_image_folder, root)


def test_folders_that_are_missing_or_empty_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for name in ("train", "train/x", "val", "val/y"):
        said = user_error(read_image_folder, root)
        assert str(root / name.partition("/")[0]) in said and (root / name).mkdir(parents=True) is None
    assert "differ in ['x', 'y']" in user_error(read_image_folder, root)
    (root / "val" / "y").rename(root / "val" / "x")
    assert user_error(read_image_folder, root).endswith(": x")


def test_files_of_other_kinds_are_counted_and_gifs_are_read(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other files (.heic, a picture beside the class folders) are left out, and the log counts them by suffix; hidden
    ones are left out without a word (docs/own_data.md)."""
    for name in ("2.gif", "3.HEIC", "4.heic", "README.txt", "labels", ".hidden", "../5.jpg", "../.DS_Store"):
        (root / "train" / "dog" / name).write_bytes(b"")
    with caplog.at_level("INFO", "qat"):
        assert ("dog/2.gif", 1) in listed(root) and len(listed(root)) == 5
    said = {each.getMessage() for each in caplog.records}
    kinds = "images lie in class folders, as .jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp .gif"
    left = "2 .heic, 1 without a suffix, 1 .jpg, 1 .txt"
    assert said == {f"data: '{root / 'train'}': files that are not read: {left}; {kinds}"}


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_a_photograph_is_turned_as_its_exif_says(suffix: str, tmp_path: Path) -> None:
    """In training, `predict` and the transform of `qat.load` alike."""
    exif, path = Image.Exif(), tmp_path / f"phone.{suffix}"
    exif[ExifTags.Base.Orientation] = 6  # the camera was held upright
    Image.fromarray(np.tile(np.arange(0, 256, 4, np.uint8), (32, 1))).convert("RGB").save(path, exif=exif, quality=95)
    picture = ImageFiles(np.array([os.fsencode(path)]), torch.zeros(1, dtype=torch.int64)).sample(0)[0]
    assert picture.size == (32, 64) and picture.getpixel((16, 0))[0] < 16 < 240 < picture.getpixel((16, 63))[0]
    with Image.open(path) as given:
        assert as_rgb(given, "it").tobytes() == picture.tobytes() and given.size == (64, 32)
