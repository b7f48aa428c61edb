"""Folders of images: which files are listed, with which label, through links too."""

import os
from pathlib import Path

import pytest

from qat.training.data.datasets import read_image_folder
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


def refusal(root: Path) -> str:
    return user_error(read_image_folder, root)


def test_files_come_by_class_then_folder_then_name(root: Path) -> None:
    inner = root / "train" / "cat" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "5.JPG").write_bytes(b"")
    (root / "train" / "cat" / "notes.txt").write_text("")
    assert listed(root) == [
        ("cat/0.png", 0),
        ("cat/1.png", 0),
        ("cat/a/b/5.JPG", 0),
        ("dog/0.png", 1),
        ("dog/1.png", 1),
    ]


def test_links_to_other_places_are_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "7.png").write_bytes(b"")
    (root / "train" / "cat" / "more").symlink_to(tmp_path / "more")
    (root / "train" / "cat" / "8.png").symlink_to(tmp_path / "more" / "7.png")  # twice under one label: harmless
    (root / "train" / "dog").rename(tmp_path / "dogs")
    (root / "train" / "dog").symlink_to(tmp_path / "dogs")
    assert [name for name, _ in listed(root)] == [
        "cat/0.png", "cat/1.png", "cat/8.png", "cat/more/7.png", "dog/0.png", "dog/1.png"
    ]  # fmt: skip


def test_hidden_files_and_folders_are_skipped(root: Path) -> None:
    expected = listed(root)
    for hidden in (".ipynb_checkpoints/0-checkpoint.png", "more/.thumbs/1.png", "._0.png", "more/._1.png"):
        path = root / "train" / "cat" / hidden
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0\5\x16\7")
    assert listed(root) == expected


@pytest.mark.parametrize("up", ["..", "."])
def test_a_link_that_leads_back_up_is_refused(root: Path, up: str) -> None:
    link = root / "train" / "cat" / "up"
    link.symlink_to(up)
    assert refusal(root) == f"data.root: '{link}' is a link that leads back up to '{link.resolve()}'; remove it"


def test_folders_that_are_missing_or_empty_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for name in ("train", "train/x", "val", "val/y"):
        said = refusal(root)
        assert str(root / name.partition("/")[0]) in said and (root / name).mkdir(parents=True) is None
    assert refusal(root) == f"data.root: '{root}': train and val need the same classes; they differ in ['x', 'y']"
    (root / "val" / "y").rename(root / "val" / "x")
    assert refusal(root).endswith("(.jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp): x")
