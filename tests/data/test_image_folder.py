"""Folders of images: every file has one label, with all kinds of links."""

import logging
import os
from pathlib import Path

import pytest
from tiny_training import user_error

from qat.training.data.image_folder import read_image_folder


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


def test_hidden_files_and_folders_are_no_images(root: Path) -> None:
    expected = listed(root)
    for hidden in (".ipynb_checkpoints/0-checkpoint.png", "more/.thumbs/1.png", "._0.png", "more/._1.png"):
        path = root / "train" / "cat" / hidden
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0\5\x16\7")
    assert listed(root) == expected


@pytest.mark.parametrize("up", ["..", "../..", "../../..", "/", "."])
def test_a_link_that_leads_back_up_is_refused(root: Path, up: str) -> None:
    link = root / "train" / "cat" / "up"
    link.symlink_to(up)
    assert refusal(root) == f"data.root: '{link}' is a link that leads back up to '{link.resolve()}'; remove it"


def test_two_links_into_each_other_are_refused(root: Path) -> None:
    cat = root / "train" / "cat"
    for one, other in (("a", "b"), ("b", "a")):
        (cat / one).mkdir()
        (cat / one / "on").symlink_to(cat / other)
    assert refusal(root) == f"data.root: '{cat}/a/on/on' is a link that leads back up to '{cat}/a'; remove it"


@pytest.mark.parametrize("kind", ["link", "hard link", "folder", "class"])
def test_a_file_in_two_classes_is_refused(root: Path, kind: str) -> None:
    cat, dog = root / "train" / "cat", root / "train" / "dog"
    second = dog / "5.png"
    if kind == "link":
        second.symlink_to(cat / "1.png")
    elif kind == "hard link":
        second.hardlink_to(cat / "1.png")
    elif kind == "folder":
        (dog / "more").symlink_to(cat)
        second = dog / "more" / "0.png"
    else:
        dog.rename(root / "dog")
        dog.symlink_to(cat)
        second = dog / "0.png"
    first = cat / ("1.png" if "link" in kind else "0.png")
    assert refusal(root) == f"data.root: '{first}' and '{second}' are one file in two classes; remove one of them"


def test_files_with_the_same_inode_number_are_told_apart(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "qat.training.data.image_folder._place", lambda entry, device: (device, 2**32 - 1)
    )  # FUSE's listing
    assert len(listed(root)) == 4


def test_validation_on_training_images_gives_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "val" / "cat" / "9.png").symlink_to(root / "train" / "cat" / "0.png")
    with caplog.at_level(logging.WARNING, logger="qat"):
        assert len(listed(root, "val")) == 5
    assert caplog.messages == [f"data.root: 1 images of val are images of train too ('{root}/val/cat/9.png' first)"]


def test_folders_that_are_missing_or_empty_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "a"
    layout = f"expected {root}/train/<class>/ and {root}/val/<class>/"
    assert refusal(root) == f"data.root: '{root}' is not a folder; {layout}"
    root.mkdir()
    assert refusal(root) == f"data.root: '{root}' has no folder train and no folder val; {layout}"
    (root / "train").mkdir()
    (root / "test").mkdir()
    assert refusal(root) == f"data.root: '{root}' has no folder val; {layout}"
    (root / "val").mkdir()
    assert refusal(root) == f"data.root: '{root}/train' holds no class folders; {layout}"
    for name in (*(f"train/c{index}" for index in range(8)), "val/c0", "val/d"):
        (root / name).mkdir()
    assert refusal(root) == (
        f"data.root: '{root}': train and val need the same class folders; only in train: c1, c2, c3, c4, c5 and 2 "
        "more; only in val: d"
    )


def test_a_class_without_images_is_refused(root: Path) -> None:
    for image in (root / "train" / "dog").iterdir():
        image.unlink()
    kinds = ".jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp"
    assert refusal(root) == f"data.root: '{root}/train' has class folders without images ({kinds}): dog"


def test_files_and_folders_that_cannot_be_read_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = root / "train" / "cat" / "7.png"
    broken.symlink_to("nowhere.png")
    assert refusal(root) == f"data.root: '{broken}' cannot be read (No such file or directory); repair or remove it"
    broken.unlink()
    closed, real = root / "train" / "cat" / "closed", os.scandir
    closed.mkdir()

    def scandir(path: str) -> object:
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr("os.scandir", scandir)
    assert refusal(root) == f"data.root: '{closed}' cannot be read (Permission denied); repair or remove it"
