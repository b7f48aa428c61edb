"""Data sets by name, their preprocessing, and batches that depend only on the seed and the epoch."""

import hashlib
import itertools
import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.transforms import v2

from qat.training.config.schema import DATASETS, AugmentConfig, DataConfig
from qat.training.data import datasets, transforms
from qat.training.data.boxes import read_yolo
from qat.training.data.datasets import build_dataset, read_digits
from qat.training.data.images import Dataset, ImageArray, ImageFiles
from qat.training.data.loaders import Data, load_data
from qat.training.data.masks import read_mask_folder
from qat.training.data.transforms import cropped, pixels_of, resized
from qat.training.errors import UserError
from tests.runs.tiny_training import CPU, user_error

EVERY_AUGMENTATION = AugmentConfig(
    random_resized_crop=True, crop_padding=2, horizontal_flip=0.5, affine=True, trivial_augment=True, random_erasing=0.5
)


def load(seed: int = 0, channels_last: bool = False, **fields: Any) -> Data:
    return load_data(DataConfig(**fields), seed, CPU, channels_last)


def epoch_of(data: Data, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    data.train.set_epoch(epoch)
    images, labels = zip(*data.train, strict=True)
    return torch.cat(images), torch.cat(labels)


def images_of(root: Path, **fields: Any) -> Data:
    return load(name="imagefolder", root=str(root), **{"image_size": 10, "workers": 0, **fields})


def refusal(**fields: Any) -> str:
    return user_error(load, **fields)


def write_folder(root: Path, split: str, **counts: int) -> None:
    """Write `counts` images, 12 wide and 10 high, into each class folder; each has its own grey level."""
    for position, (name, count) in enumerate(counts.items()):
        folder = root / split / name
        folder.mkdir(parents=True)
        for index in range(count):
            Image.fromarray(np.full((10, 12, 3), 100 * position + index, np.uint8)).save(folder / f"{index}.png")


def npz(folder: Path, **changed: np.ndarray | None) -> dict[str, Any]:
    """Write a.npz, and return the config's name and root for it."""
    arrays: dict[str, np.ndarray | None] = {
        "x_train": np.zeros((4, 8, 8, 3), np.uint8),
        "y_train": np.array([0, 1, 2, 0]),
        "x_val": np.zeros((2, 8, 8, 3), np.uint8),
        "y_val": np.array([2, 1]),
    }
    np.savez(folder / "a.npz", **{name: array for name, array in (arrays | changed).items() if array is not None})
    return {"name": "npz", "root": str(folder / "a.npz")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path, "train", cat=3, dog=2)
    write_folder(tmp_path, "val", cat=1, dog=2)
    return tmp_path


@pytest.mark.parametrize("name", [b"caf\xe9", b"\x1b[31m"])
def test_names_of_classes_are_plain_text(folder: Path, name: bytes) -> None:
    for split in ("train", "val"):
        (folder / split / "cat").rename(folder / split / os.fsdecode(name))
    said = f"the class {os.fsdecode(name)!r} has control characters, or is not UTF-8; write it as plain text"
    assert refusal(name="imagefolder", root=str(folder)) == f"data: {said}"


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    for split, kind in itertools.product(("train", "val"), ("images", "masks", "labels")):
        (tmp_path / split / kind).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / split / kind / "a.png")
        (tmp_path / split / kind / "a.txt").write_text("0 .5 .5 .2 .2", "utf-8-sig")
    (tmp_path / "classes.txt").write_text("cat\ndog", "utf-8-sig")
    assert read_mask_folder(tmp_path)[1] == ["cat", "dog"] == read_yolo(tmp_path)[1][1:]


def test_digits_are_the_published_ones() -> None:
    images, labels = read_digits()
    # Of scikit-learn 1.9's load_digits(): .images as uint8, .target as uint8.
    assert hashlib.sha256((images // 15).tobytes()).hexdigest() == (
        "8f26b2bd9d135c256808f68f14fdabddde6d9c7f869ae419704b051f0f14b3b3"
    )
    assert hashlib.sha256(labels.astype(np.uint8).tobytes()).hexdigest() == (
        "8ba4f891220f5e4c9c819638d1602d74b83618f167043c6da52a2a247841ddf0"
    )
    assert not (images % 15).any()


def test_digits_split_is_fixed_stratified_and_without_overlap() -> None:
    dataset = build_dataset(DataConfig(), seed=0)
    other = build_dataset(DataConfig(), seed=1)
    train, val = ({image.numpy().tobytes() for image in split.images} for split in (dataset.train, dataset.val))
    assert (len(train), len(val), len(train & val)) == (1437, 360, 0)
    assert torch.equal(dataset.val.images, other.val.images)
    counts = torch.bincount(dataset.train.labels) + torch.bincount(dataset.val.labels)
    shares = torch.bincount(dataset.val.labels) / counts
    assert (shares - 0.2).abs().max() < 0.006  # one image of 170


def test_batches_have_the_shape_type_and_range_that_the_config_says() -> None:
    data = load(channels_last=True, batch_size=100, image_size=24)
    images, labels = next(iter(data.train))
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == (
        (100, 3, 24, 24), torch.float32, (100,), torch.int64,
    )  # fmt: skip
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images[:, 0], images[:, 2])
    assert images.min() == -1
    assert images.max() == pytest.approx(240 / 255 * 2 - 1)
    assert (len(data.train), [len(labels) for _, labels in data.val]) == (14, [200, 160])
    assert (data.classes, data.image_shape) == ([str(digit) for digit in range(10)], (3, 24, 24))
    assert [len(labels) for _, labels in load(limit_train=10).train] == [10]  # fewer than a batch


@pytest.mark.parametrize("workers", [0, min(2, os.cpu_count() or 1)])
def test_an_epoch_depends_on_seed_and_epoch_only(workers: int) -> None:
    """A resumed run gets the same batches, whatever ran before (epochs, other random numbers) and wherever."""
    fields = {"limit_train": 40, "batch_size": 16, "image_size": 16, "augment": EVERY_AUGMENTATION}
    data = load(seed=3, **fields, workers=workers)
    first, second = epoch_of(data, 0), epoch_of(data, 1)
    torch.rand(7)
    resumed = epoch_of(load(seed=3, **fields, workers=0), 1)
    assert torch.equal(second[0], resumed[0])
    assert torch.equal(second[1], resumed[1])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(epoch_of(load(seed=4, **fields), 1)[0], second[0])
    assert torch.equal(epoch_of(data, 0)[0], first[0])


def test_loading_leaves_the_global_generator_alone() -> None:
    data = load(limit_train=40, augment=EVERY_AUGMENTATION)
    before = torch.get_rng_state()
    epoch_of(data, 0)
    list(data.val)
    list(data.calibration(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_calibration_is_training_images_without_augmentation() -> None:
    plain = load(limit_train=50, batch_size=16)
    known = {image.numpy().tobytes() for image in epoch_of(plain, 0)[0]}
    known |= {image.numpy().tobytes() for image in epoch_of(plain, 1)[0]}
    data = load(limit_train=50, batch_size=16, augment=AugmentConfig(affine=True, horizontal_flip=1.0))
    batches = data.calibration(2)
    images = torch.cat([batch for batch, _ in batches])
    assert len(images) == 32
    assert {image.numpy().tobytes() for image in images} <= known
    assert torch.equal(torch.cat([batch for batch, _ in batches]), images)
    assert torch.equal(torch.cat([batch for batch, _ in data.calibration(9)])[:32], images)
    assert sum(len(batch) for batch, _ in data.calibration(9)) == 50


def test_resizing_up_front_changes_no_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 12, 9, 3), np.uint8)
    fields = npz(tmp_path, x_train=pixels, y_train=np.array([0, 1, 2, 0, 1, 2]))
    fields |= {"image_size": 16, "resize_size": 20}
    fast = load(**fields)
    assert fast.train._batches.dataset.images.images.shape == (6, 3, 26, 20)  # type: ignore[attr-defined]
    monkeypatch.setattr(transforms, "MAX_RESIZED_BYTES", 0)
    slow = load(**fields)
    assert slow.train._batches.dataset.images.images.shape == (6, 3, 12, 9)  # type: ignore[attr-defined]
    assert torch.equal(epoch_of(fast, 0)[0], epoch_of(slow, 0)[0])


def test_random_crops_are_cut_from_the_full_image(tmp_path: Path) -> None:
    fields = npz(tmp_path, x_train=np.zeros((4, 64, 64), np.uint8))
    data = load(**fields, image_size=16, augment=AugmentConfig(random_resized_crop=True))
    assert data.train._batches.dataset.images.images.shape == (4, 1, 64, 64)  # type: ignore[attr-defined]
    assert epoch_of(data, 0)[0].shape == next(iter(data.calibration(1)))[0].shape == (4, 3, 16, 16)


def test_limits_choose_the_same_images_for_every_seed() -> None:
    chosen = [torch.cat([images for images, _ in load(seed=seed, limit_val=20).val]) for seed in (0, 1)]
    assert torch.equal(*chosen)
    assert len(chosen[0]) == 20


def test_imagefolder_reads_classes_and_normalises_as_configured(folder: Path) -> None:
    data = images_of(folder, mean=(0, 0, 0), std=(1, 0.5, 1), batch_size=5)
    images, labels = epoch_of(data, 0)
    assert data.classes == ["cat", "dog"] and images_of(folder).preprocessing.mean == (0.485, 0.456, 0.406)
    assert images.shape == (5, 3, 10, 10)
    red = (images[:, 0, 0, 0] * 255).round()
    assert sorted(zip(labels.tolist(), red.tolist(), strict=True)) == [(0, 0), (0, 1), (0, 2), (1, 100), (1, 101)]
    assert torch.allclose(images[:, 1], 2 * images[:, 0])


@pytest.mark.parametrize("size", [(8, 12), (33, 20), (20, 33), (7, 7), (16, 16), (50, 71)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_resized_and_cropped_as_by_torchvision(size: tuple[int, int], channels: int) -> None:
    tensor = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (channels, *size), np.uint8))
    theirs = v2.Compose([v2.Resize(16, antialias=True), v2.CenterCrop(15)])
    assert torch.equal(torch.as_tensor(cropped(resized(tensor, 16), 15)), theirs(tensor))
    image = v2.functional.to_pil_image(tensor).convert("RGB")
    assert np.array_equal(np.asarray(cropped(resized(image, 16), 15)), np.asarray(theirs(image)))
    assert torch.equal(pixels_of(image), v2.functional.pil_to_tensor(image))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_one_sentence_also_from_a_worker(folder: Path, workers: int) -> None:
    path = folder / "val" / "dog" / "1.png"
    path.write_bytes(b"not a png")
    data = images_of(folder, workers=workers)
    said = f"data.root: '{path}' is not a readable image (no known format); repair or remove it"
    # No `as caught`: that would leave the loader to the garbage collector, where torch waits 5 s for the worker.
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        list(data.val)


def test_a_truncated_image_and_one_of_16_bits_are_refused(folder: Path) -> None:
    path = folder / "val" / "cat" / "0.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:4000])
    data = images_of(folder)
    said = user_error(list, data.val)
    assert re.fullmatch(r"data.root: '.*0\.png' is not a readable image \(.*truncated.*\); repair or remove it", said)
    Image.fromarray(np.full((8, 8), 300, np.uint16)).save(path)
    said = user_error(list, data.val)
    assert said == f"data.root: '{path}' has pixels of mode 'I;16'; save it with 8 bits a channel"


@pytest.mark.parametrize(("fields", "beginning"), [
    ({"name": "fake", "download": True}, "data.download: true has no effect with 'fake'; it is for cifar10, cifar"),
    ({"root": "x"}, "data.root: 'x' has no effect: data.name 'digits' is bundled"),
    ({"name": "imagefolder"}, "data.root: missing; data.name 'imagefolder' needs the path of the folder"),
    ({"name": "npz"}, "data.root: missing; data.name 'npz' needs the path of the .npz file"),
])  # fmt: skip
def test_wrong_settings_are_refused(fields: dict[str, Any], beginning: str) -> None:
    assert refusal(**fields).startswith(beginning)


def test_npz_reads_colour_and_grey(tmp_path: Path) -> None:
    grey = np.arange(2 * 64, dtype=np.uint8).reshape(2, 8, 8)
    data = load(
        **npz(tmp_path, x_val=grey, y_val=np.array([3, 0], np.uint8), classes=np.array(["a", "b", "c", "d"])),
        image_size=8,
    )
    images, labels = next(iter(data.val))
    assert data.classes == ["a", "b", "c", "d"] and load(**npz(tmp_path)).classes == ["0", "1", "2"]
    assert labels.tolist() == [3, 0]
    assert torch.equal((images[:, 2] * 127.5 + 127.5).round(), torch.from_numpy(grey).float())


@pytest.mark.parametrize(("changed", "fact"), [
    ({"y_val": None, "x_train": None}, "has no x_train, y_val"),
    ({"y_val": np.array([0, 7])}, "val: labels go from 0 to 7, but classes has length 3"),
    ({"x_val": np.zeros((2, 3, 8, 8), np.uint8)}, "val: images must be a uint8 tensor"),
    ({"x_val": np.zeros((2, 8), np.uint8)}, "images must be (N, H, W) or (N, H, W, C) and labels integers, got (2"),
    ({"y_train": np.zeros(4)}, "labels integers, got (4, 8, 8, 3) and float64"),
    ({"y_val": np.array([0, "a"], object)}, "Object arrays cannot be loaded when allow_pickle=False"),
])  # fmt: skip
def test_npz_mistakes_are_sentences(tmp_path: Path, changed: dict[str, np.ndarray | None], fact: str) -> None:
    fields = npz(tmp_path, **changed)
    said = refusal(**fields)
    assert said.startswith(f"data.root: '{fields['root']}'") and fact in said and len(said.splitlines()) == 1


def test_the_digest_tells_other_images_and_other_labels(tmp_path: Path) -> None:
    pixels, labels = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2), torch.tensor([0, 1])
    files = np.array([b"/a/cat/1.png", b"/a/dog/2.png"])
    arrays = [ImageArray(pixels, labels), ImageArray(pixels.flip(0), labels), ImageArray(pixels, labels.flip(0))]
    listed = [ImageFiles(files, labels), ImageFiles(files[::-1], labels), ImageFiles(files, labels.flip(0))]
    assert len({each.digest() for each in (*arrays, *listed)}) == 6
    assert ImageArray(pixels.contiguous(memory_format=torch.channels_last), labels).digest() == arrays[0].digest()
    assert ImageFiles(np.array([b"b/cat/1.png", b"b/dog/2.png"]), labels).digest() == listed[0].digest()


def test_files_that_are_not_npz_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    assert refusal(name="npz", root=str(path)).startswith(f"data.root: '{path}' is not a file; it must be an .npz")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert refusal(name="npz", root=str(path)).startswith(f"data.root: '{path}' is not an .npz of plain arrays")


def write_mnist(raw: Path, split: str, images: int, labels: Sequence[int]) -> None:
    """Write MNIST's format: two zero bytes, type 8 (uint8), the number of axes, each axis as big-endian uint32."""
    raw.mkdir(parents=True, exist_ok=True)
    for name, array in (
        ("images-idx3", np.full((images, 28, 28), 51, np.uint8)),
        ("labels-idx1", np.array(labels, np.uint8)),
    ):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (raw / f"{split}-{name}-ubyte").write_bytes(header + array.tobytes())


def test_mnist_files_are_read(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("t10k", 4)):
        write_mnist(tmp_path / "FashionMNIST" / "raw", split, count, range(count))
    data = load(name="fashion_mnist", root=str(tmp_path), image_size=28)
    images, labels = next(iter(data.val))
    mean, std = 0.2860, 0.3530
    assert images.shape == (4, 3, 28, 28)
    assert images.unique().item() == pytest.approx((0.2 - mean) / std, rel=1e-5)
    assert labels.tolist() == [0, 1, 2, 3]
    assert (len(data.classes), sorted(epoch_of(data, 0)[1].tolist())) == (10, list(range(6)))


def test_an_absent_set_suggests_to_download_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(name="mnist", root=str(tmp_path)) == (
        f"data.root: '{tmp_path}' has no complete mnist; set data.download: true"
    )

    def offline(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    assert refusal(name="cifar10", root=str(tmp_path), download=True) == (
        "data.download: cifar10 could not be downloaded (<urlopen error no network>)"
    )


def test_validation_crops_the_centre_of_the_resized_image(tmp_path: Path) -> None:
    pixels = np.zeros((1, 8, 12, 3), np.uint8)
    pixels[0, 2:6, 4:8] = 255
    data = load(**npz(tmp_path, x_val=pixels, y_val=np.array([0])), image_size=4, resize_size=8)
    images = next(iter(data.val))[0]
    assert torch.equal(images, torch.ones(1, 3, 4, 4))


def test_cifar_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    reader = torchvision.datasets.CIFAR10
    names = [name for name, _ in reader.train_list + reader.test_list]
    for name in names:
        pixels = np.zeros((2, 3, 32, 32), np.uint8)
        pixels[:, 1] = 255  # green
        (folder / name).write_bytes(pickle.dumps({"data": pixels.reshape(2, -1), "labels": [4, 9]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {label}" for label in range(10)]}))

    # The files are not the published ones, so their checksums cannot be.
    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda path, md5=None: os.path.isfile(path))
    data = load(name="cifar10", root=str(tmp_path), batch_size=10)
    images, labels = epoch_of(data, 0)
    assert (data.classes[4], sorted(labels.tolist())) == ("class 4", [4] * 5 + [9] * 5)
    expected = [-0.4914 / 0.2470, (1 - 0.4822) / 0.2435, -0.4465 / 0.2616]
    assert images[0, :, 0, 0].tolist() == pytest.approx(expected, rel=1e-5)


IMAGES, LABELS = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1, 0])
OTHER_FORMS = [
    ({"train": IMAGES}, "train must be an ImageArray, ImageFiles, MaskFiles or BoxFiles, got Tensor"),
    (
        {"val": ImageArray(IMAGES.expand(4, 4, 8, 8), LABELS)},
        "val: images must be a uint8 tensor (N, 1 or 3, H, W), got Tensor torch.uint8 (4, 4, 8, 8)",
    ),
    ({"classes": ["dark"]}, "train: labels go from 0 to 1, but classes has length 1"),
    (
        {"val": ImageArray(IMAGES, LABELS[:2])},
        "val: labels must be an int64 tensor (4,) or masks or boxes of the images, got Tensor torch.int64 (2,)",
    ),
    ({"mean": (0.5,)}, "mean and std must be 3 numbers, std > 0, got (0.5,) and (0.5, 0.5, 0.5)"),
    ({"val": ImageArray(IMAGES[:0], LABELS[:0])}, "val has no images"),
]


@pytest.mark.parametrize(("changes", "problem"), OTHER_FORMS)
def test_images_and_labels_of_another_form_are_refused(changes: dict[str, Any], problem: str) -> None:
    split = ImageArray(IMAGES, LABELS)
    with pytest.raises(TypeError if "must be an ImageArray" in problem else ValueError) as raised:
        Dataset(**{"train": split, "val": split, "classes": ["dark", "bright"], **changes})
    assert str(raised.value) == f"Dataset: {problem}"


def test_every_shipped_name_has_a_builder() -> None:
    assert set(datasets._BUILDERS) == set(DATASETS)
