"""Augmentation of whole batches: what torchvision's transforms of one image can give, from each image's own seed."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms import v2

from qat.training.config.schema import AugmentConfig, DataConfig
from qat.training.data import loaders
from qat.training.data.images import ImageArray
from qat.training.data.loaders import BatchedImages, TransformedImages, View, load_data, training_view
from qat.training.data.transforms import BatchTransform, Preprocessing, cutout, uniform
from tests.runs.tiny_training import CPU, Logged, Patch

PLAIN = Preprocessing(6, 8, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
AS_STORED = Preprocessing(8, 8, (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))


def stored(count: int = 64, channels: int = 3, height: int = 8, width: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def transformed(images: Tensor, plain: Preprocessing = AS_STORED, first: int = 0, **augment: Any) -> Tensor:
    """The images, each with its own seed, with these augmentations."""
    return BatchTransform(AugmentConfig(**augment), plain)(images, torch.arange(first, first + len(images)))


@pytest.mark.parametrize("channels", [1, 3])
def test_without_augmentation_it_is_the_pipeline_of_one_image(channels: int) -> None:
    images = stored(channels=channels)
    expected = torch.stack([PLAIN.apply(image) for image in images])
    assert torch.equal(transformed(images, PLAIN), expected)


def test_random_numbers_are_uniform_and_differ_by_seed_and_stream() -> None:
    seeds = torch.arange(20_000)
    numbers = torch.stack([uniform(seeds, stream) for stream in (0, 1, 50)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers.float(), 100, 0, 1)
    assert (counts - 600).abs().max() < 5 * 600**0.5
    assert np.abs(np.corrcoef(numbers.numpy()) - np.eye(3)).max() < 0.03
    assert torch.equal(uniform(torch.tensor([2**32 - 1, 7]), 3)[1:], uniform(torch.tensor([7]), 3))


def test_crops_and_mirrored_crops_are_cut_from_the_padded_image_everywhere() -> None:
    (image,) = stored(1)
    found = transformed(image.expand(3000, -1, -1, -1), crop_padding=2, horizontal_flip=0.25)
    padded = F.pad(image, (2, 2, 2, 2)).float()
    seen = {}
    for top in range(5):
        for left in range(7):
            crop = padded[:, top : top + 8, left : left + 8]
            for mirrored, view in ((False, crop), (True, crop.flip(2))):
                seen[top, left, mirrored] = int((found == view).flatten(1).all(1).sum())
    assert sum(seen.values()) == 3000 and min(seen.values()) > 5
    assert 0.22 < sum(count for key, count in seen.items() if key[2]) / 3000 < 0.28


def test_a_flip_alone_keeps_the_centre() -> None:
    images = stored()
    found, centre = transformed(images, PLAIN, horizontal_flip=1.0), transformed(images, PLAIN)
    assert torch.equal(found, centre.flip(3))


def cleared(images: Tensor) -> Tensor:
    """The share of each image that is 0; no stored pixel is."""
    return (images == 0).float().mean((1, 2, 3))


def test_erasing_takes_rectangles_as_torchvision_does() -> None:
    ones = torch.ones(4000, 3, 16, 16, dtype=torch.uint8)
    plain = Preprocessing(16, 16, AS_STORED.mean, AS_STORED.std)
    shares = cleared(transformed(ones, plain, random_erasing=0.75))
    torch.manual_seed(0)
    erase = v2.RandomErasing(0.75)
    reference = cleared(torch.stack([erase(image) for image in ones.float()]))
    assert abs((shares > 0).float().mean() - 0.75) < 0.03
    found, expected = (each[each > 0].quantile(torch.tensor([0.1, 0.5, 0.9])) for each in (shares, reference))
    assert (found - expected).abs().max() < 0.03
    erased = transformed(ones, plain, random_erasing=1.0)[:, 0] == 0
    corners = erased.any(2).sum(1) * erased.any(1).sum(1)
    assert torch.equal(corners, erased.sum((1, 2)))  # each a full rectangle


@pytest.mark.parametrize("in_batches", [True, False])
def test_cutout_is_a_square_around_any_pixel(in_batches: bool) -> None:
    ones = torch.ones(4000, 3, 8, 8, dtype=torch.uint8)
    torch.manual_seed(0)
    found = transformed(ones, cutout=3) if in_batches else torch.stack([cutout(image, 3) for image in ones.float()])
    areas = (cleared(found) * 64).round().long()
    assert torch.equal(areas.unique(), torch.tensor([4, 6, 9]))  # at a corner, at an edge, inside
    assert abs((areas == 9).float().mean() - (6 / 8) ** 2) < 0.03
    assert torch.equal((found == 0).all(1), (found == 0).any(1))


def test_an_image_depends_on_its_own_seed_alone() -> None:
    images, every = stored(), {"crop_padding": 2, "horizontal_flip": 0.5, "random_erasing": 0.5, "cutout": 2}
    whole = transformed(images, **every)
    assert torch.equal(whole[40:], transformed(images[40:], first=40, **every))
    assert not torch.equal(whole, transformed(images, first=1000, **every))


@pytest.mark.parametrize(("augment", "batched"), [
    ({}, True),
    ({"crop_padding": 4, "cutout": 4}, True),
    ({"affine": True}, False),
    ({"trivial_augment": True}, False),
])  # fmt: skip
def test_which_sets_are_transformed_in_batches(augment: dict[str, Any], batched: bool, monkeypatch: Any) -> None:
    made = []
    monkeypatch.setattr(loaders, "Loader", lambda view, *args, **kwargs: made.append(type(view)))
    load_data(DataConfig(name="digits", augment=AugmentConfig(**augment)), 0, CPU, False)
    assert made == [BatchedImages if batched else TransformedImages, BatchedImages]
    wide = ImageArray(stored(), torch.zeros(64, dtype=torch.int64))
    assert not BatchTransform.supports(
        wide.images, AugmentConfig(), Preprocessing(6, 7, PLAIN.mean, PLAIN.std)
    )  # to be resized


CUDA = torch.device("cuda")
AUGMENTATIONS: list[dict[str, Any]] = [
    {}, {"horizontal_flip": 0.5}, {"crop_padding": 2, "horizontal_flip": 0.5}, {"random_erasing": 0.5}, {"cutout": 2}
]  # fmt: skip
SET = ImageArray(stored(height=8, width=8), torch.arange(64) % 3)


def on_cuda(augment: dict[str, Any], **data: Any) -> View:
    """The view of the training images for a CUDA device."""
    config = DataConfig(name="fake", augment=AugmentConfig(**augment), **data)
    return training_view(SET, config, AS_STORED, CUDA)


@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_on_cuda_every_operation_of_a_batch_is_on_the_device(augment: dict[str, Any], monkeypatch: Patch) -> None:
    """Tensors without contents check devices as CUDA does, so this needs no GPU."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    with FakeTensorMode(allow_non_fake_inputs=True):
        view = on_cuda(augment)
        assert isinstance(view, BatchedImages) and view.images.labels.device.type == "cuda"
        images, labels = view.__getitems__([(5, 11), (2, 13)])
    assert (images.device.type, tuple(images.shape), images.dtype) == ("cuda", (2, 3, 8, 8), torch.float32)
    assert (labels.device.type, tuple(labels.shape)) == ("cuda", (2,))


def test_training_images_stay_in_host_memory_where_loader_processes_or_the_free_memory_ask_for_it(
    monkeypatch: Patch, caplog: Logged
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * SET.images.nbytes - 1, 2**31))
    for view in (on_cuda({}), on_cuda({}, workers=2), on_cuda({"affine": True})):
        assert isinstance(view, TransformedImages) or view.images.labels.device.type == "cpu"
    assert len(caplog.messages) == 1 and "stay in host memory" in caplog.messages[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_a_batch_on_cuda_is_that_of_the_cpu(augment: dict[str, Any]) -> None:
    keys, config = [(5, 11), (2, 13), (9, 2**32 - 1)], DataConfig(name="fake", augment=AugmentConfig(**augment))
    (found, labels), (expected, expected_labels) = (
        training_view(SET, config, AS_STORED, device).__getitems__(keys) for device in (CUDA, CPU)
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(labels.cpu(), expected_labels)
