"""Boxes: the readers of detection's formats, and the transform against a computation of its own."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qat.training.config.schema import AugmentConfig, DataConfig
from qat.training.data.boxes import BoxedTransform
from qat.training.data.datasets import build_dataset
from qat.training.data.images import BoxFiles, Dataset, ImageArray, Images
from qat.training.data.loaders import load_data, plain_view
from qat.training.data.transforms import Preprocessing, pixels_of
from qat.training.errors import UserError
from qat.training.run.checkpoint import preprocessing_of
from tests.runs.tiny_training import CPU, user_error

PLAIN = Preprocessing(32, 32, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), stretched=True)
Break = Callable[[Path], object]


def picture(path: Path, width: int = 40, height: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def annotation(number: int, image: int, category: int, bbox: Any, **more: Any) -> dict[str, Any]:
    return {"id": number, "image_id": image, "category_id": category, "bbox": bbox, **more}


def write_coco(root: Path, changed: list[dict[str, Any]] = [], **more: Any) -> None:  # noqa: B006
    """Two pictures a split; categories 7 (cat) and 3 (dog); the second picture has no objects."""
    for split in ("train", "val"):
        for name in "ab":
            picture(root / split / f"{name}.png")
        content = {
            "images": [{"id": k, "file_name": f"{'ab'[k]}.png", "width": 40, "height": 20} for k in (0, 1)],
            "categories": [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}],
            "annotations": [annotation(1, 0, 7, [4, 2, 10, 5]), annotation(2, 0, 3, [30, 10, 15, 5.5], iscrowd=1)],
        }
        content["annotations"] += changed
        write(root / f"annotations/{split}.json", json.dumps(content | more))


def voc_object(name: str, corners: tuple[object, ...], difficult: int = 0) -> str:
    sides = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    box = "".join(f"<{key}>{value}</{key}>" for key, value in sides)
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
    return f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>{box}</bndbox>{part}</object>"


def write_voc(root: Path) -> None:
    base = root / "VOCdevkit/VOC2012"
    objects = voc_object("tvmonitor", (1, 1, 40, 20)) + voc_object("cat", (5, 3, 14, 7), difficult=1)
    for split in ("train", "val"):
        write(base / f"ImageSets/Main/{split}.txt", f"{split}_a\n{split}_b\n")
        for name, content in (("a", objects), ("b", "")):
            picture(base / f"JPEGImages/{split}_{name}.jpg")
            write(base / f"Annotations/{split}_{name}.xml", f"<annotation>{content}</annotation>")


def write_yolo(root: Path, names: str = "names: [cat, dog]") -> None:
    for split in ("train", "val"):
        picture(root / split / "images/a.jpg")
        picture(root / split / "images/b.PNG")
        write(root / split / "labels/a.txt", "1 0.5 0.5 0.5 0.2\n\n0 0.1 0.2 0.4 0.3 0.3 0.9\n0 0.05 0.5 0.11 1\n")
    write(root / "data.yaml", names)


def read(name: str, root: Path) -> Dataset:
    return build_dataset(DataConfig(name=name, root=str(root)), 0)


def rows_of(split: Images, index: int) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in split.sample(index)[1].tolist()]


def test_coco_is_read_and_what_reaches_over_the_edge_is_clamped(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "qat")
    write_coco(tmp_path, [annotation(8, 0, 7, [5, 5, 0, 9]), annotation(9, 0, 7, [50, 2, 5, 5])])
    found = read("coco", tmp_path)
    assert found.classes == ["background", "dog", "cat"] and found.train.kind == "boxes"
    assert rows_of(found.val, 0) == [[2, 4, 2, 14, 7, 0], [1, 30, 10, 40, 15.5, 1]] and rows_of(found.val, 1) == []
    assert "2 boxes without area in their image are left out, as of" in caplog.text
    assert "1 of 2 images are without objects" in caplog.text


def test_coco_may_have_its_own_names_of_folders_and_files(tmp_path: Path) -> None:
    write_coco(tmp_path)
    for split in ("train", "val"):
        (tmp_path / split).rename(tmp_path / f"{split}2017")
        (tmp_path / f"annotations/{split}.json").rename(tmp_path / f"annotations/instances_{split}2017.json")
    assert len(read("coco", tmp_path).train) == 2


def test_voc_counts_pixels_from_one_and_keeps_what_is_difficult(tmp_path: Path) -> None:
    write_voc(tmp_path)
    found = read("voc_boxes", tmp_path)
    assert found.classes[20] == "tv monitor" and len(found.classes) == 21
    assert rows_of(found.val, 0) == [[20, 0, 0, 40, 20, 0], [8, 4, 2, 14, 7, 1]] and rows_of(found.val, 1) == []


@pytest.mark.parametrize("names", ["names: [cat, dog]", "names: {0: cat, 1: dog}", None])
def test_yolo_gives_pixels_of_boxes_and_polygons(tmp_path: Path, names: str | None) -> None:
    write_yolo(tmp_path, names or "")
    if names is None:
        write(tmp_path / "classes.txt", "cat\ndog\n")
    found = read("yolo", tmp_path)
    assert found.classes == ["background", "cat", "dog"] and rows_of(found.train, 1) == []
    assert rows_of(found.train, 0) == [[2, 10, 8, 30, 12, 0], [1, 4, 4, 16, 18, 0], [1, 0, 0, 4.2, 20, 0]]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda f: write_coco(f, [annotation(9, 0, 5, [1, 1, 1, 1])]), "train.json': annotation 9 .*KeyError: 5"),
        (lambda f: write_coco(f, [annotation(9, 6, 3, [1, 1, 1, 1])]), "annotation 9 .*KeyError: 6.*image_id"),
        (lambda f: write_coco(f, [annotation(9, 0, 3, [1, 1, 1])]), "annotation 9 .*expected a bbox of x, y, width"),
        (lambda f: write_coco(f, [annotation(9, 0, 3, [1, 1, -1, 1])]), r"annotation 9 .*from \(1, 1\) to \(0, 2\)"),
        (lambda f: write_coco(f, [annotation(9, 0, 3, [1, float("nan"), 1, 1])]), r"annotation 9 .*from \(1, nan\)"),
        (lambda f: write_coco(f, images=[{"id": 0}], annotations=[]), "train.json' .*KeyError: 'width'"),
        (lambda f: write_coco(f, images=[], annotations=[]), "train.json' has no images"),
        (lambda f: write_coco(f, images=[{"id": 0, "width": 9, "height": 0}], annotations=[]), "no width or height"),
        (lambda f: write_coco(f, images=[{"id": 0, "width": 9, "height": 9}] * 2), "two images have one id"),
        (lambda f: write_coco(f, [annotation(9, 0, 3, [1, 1, 1, 1], iscrowd=None)]), "annotation 9 .*TypeError"),
        (lambda f: write(f / "annotations/val.json", "{"), "val.json' is not as it should be .JSONDecodeError"),
        (lambda f: (f / "annotations/val.json").unlink(), "val.json' cannot be read .No such file"),
        (lambda f: (f / "val/b.png").unlink(), "val/b.png' does not exist"),
        (
            lambda f: write(
                f / "annotations/val.json", '{"images": [], "annotations": [], "categories": [{"id": 1, "name": "x"}]}'
            ),
            "val.json' .*its categories are not those of train",
        ),
    ],
)
def test_broken_annotations_of_coco_are_one_sentence(tmp_path: Path, broken: Break, said: str) -> None:
    write_coco(tmp_path)
    broken(tmp_path)
    with pytest.raises(UserError, match=said):
        read("coco", tmp_path)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda f: write(f / "Annotations/val_a.xml", "<annotation>"), "val_a.xml' .*ParseError"),
        (lambda f: write(f / "Annotations/val_a.xml", f"<a>{voc_object('dragon', (1, 1, 2, 2))}</a>"), "KeyError: 'dr"),
        (lambda f: write(f / "Annotations/val_a.xml", f"<a>{voc_object('cat', (9, 1, 2, 2))}</a>"), "object 1 .*a box"),
        (lambda f: write(f / "Annotations/val_a.xml", f"<a>{voc_object('cat', ('x', 1, 2, 2))}</a>"), "object 1 "),
        (lambda f: (f / "Annotations/val_b.xml").unlink(), "val_b.xml' cannot be read"),
        (lambda f: (f / "JPEGImages/val_b.jpg").unlink(), "val_b.jpg' does not exist"),
    ],
)
def test_broken_annotations_of_voc_are_one_sentence(tmp_path: Path, broken: Break, said: str) -> None:
    write_voc(tmp_path)
    broken(tmp_path / "VOCdevkit/VOC2012")
    with pytest.raises(UserError, match=said):
        read("voc_boxes", tmp_path)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda f: write(f / "train/labels/a.txt", "2 0.5 0.5 0.1 0.1"), "a.txt' .*the line 2.*a class from 0 to 1"),
        (lambda f: write(f / "train/labels/a.txt", "0 20 10 5 5"), "a.txt' .*the line 0 20.*shares of the image"),
        (lambda f: write(f / "train/labels/a.txt", "0 0.5 nan 0.1 0.1"), "a.txt' .*the line"),
        (lambda f: write(f / "train/labels/a.txt", "0 0.5 0.5 0.1 0.1 0.9"), "a.txt' .*the line"),
        (lambda f: write(f / "train/labels/a.txt", "cat 0.5 0.5 0.1 0.1"), "a.txt' .*could not convert .*'cat'"),
        (lambda f: write(f / "val/labels/c.txt", ""), "c.txt' has no image in"),
        (lambda f: [path.unlink() for path in (f / "val").glob("*/*")], "val/images' has no images"),
        (lambda f: write(f / "data.yaml", "names: {1: cat}"), "data.yaml' .*KeyError: 0"),
        (lambda f: write(f / "data.yaml", "names: ["), "data.yaml' is not as it should be .ParserError"),
        (lambda f: (f / "data.yaml").unlink(), "classes.txt' cannot be read .*or names in"),
    ],
)
def test_broken_text_files_of_yolo_are_one_sentence(tmp_path: Path, broken: Break, said: str) -> None:
    write_yolo(tmp_path)
    broken(tmp_path)
    with pytest.raises(UserError, match=said):
        read("yolo", tmp_path)


def test_boxes_follow_a_picture_that_was_resized(tmp_path: Path) -> None:
    write_coco(tmp_path)
    picture(tmp_path / "val/a.png", 80, 60)
    _, rows = read("coco", tmp_path).val.sample(0)
    assert rows[0].tolist() == pytest.approx([2, 8, 6, 28, 21, 0])


def test_boxes_of_another_picture_are_said_when_it_is_read(tmp_path: Path) -> None:
    write_voc(tmp_path)
    found = read("voc_boxes", tmp_path)
    picture(Path(os.fsdecode(found.val.paths[0])), 2, 2)
    with pytest.raises(UserError, match="is of 2 x 2 pixels, and has a box outside"):
        found.val.sample(0)


def test_a_subset_keeps_the_boxes_of_each_picture(tmp_path: Path) -> None:
    write_yolo(tmp_path)
    whole = read("yolo", tmp_path).train
    part = whole.subset(torch.tensor([1, 0, 0]))
    assert [rows_of(part, index) for index in range(3)] == [rows_of(whole, index) for index in (1, 0, 0)]
    assert len(whole) == 2 and whole.digest() == whole.subset(torch.tensor([0, 1])).digest() != part.digest()


def squares(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A picture, 48 wide and 24 high, and three boxes."""
    rng = np.random.default_rng(seed)
    corners = np.array([[4, 3, 20, 9], [30, 10, 48, 24], [10, 12, 10.25, 20]], np.float32)
    rows = np.concatenate([[[1], [2], [1]], corners, [[0], [1], [0]]], axis=1).astype(np.float32)
    return torch.from_numpy(rng.integers(0, 256, (3, 24, 48), dtype=np.uint8)), torch.from_numpy(rows)


@pytest.mark.parametrize("stored", ["pillow", "torch"])
def test_the_whole_picture_is_stretched_to_the_bit_as_for_prediction(stored: Any) -> None:
    image, rows = squares()
    given = Image.fromarray(image.permute(1, 2, 0).numpy()) if stored == "pillow" else image
    x, moved = BoxedTransform(AugmentConfig(), PLAIN)(given, rows)
    assert torch.equal(x, PLAIN.apply(given)) and x.shape == (3, 32, 32)
    wanted = rows.numpy() * np.array([1, 32 / 48, 32 / 24, 32 / 48, 32 / 24, 1])
    np.testing.assert_allclose(moved, wanted, rtol=1e-6)  # the third is a sixth of a pixel wide, and stays
    lengthened = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((32, 32), Image.Resampling.BILINEAR)
    assert (x * 255 - pixels_of(lengthened)).abs().max() <= 1.01  # an independent resize


def test_a_mirrored_picture_has_mirrored_boxes() -> None:
    image, rows = squares()
    x, moved = BoxedTransform(AugmentConfig(horizontal_flip=1.0), PLAIN)(image, rows)
    assert torch.equal(x, PLAIN.apply(image).flip(-1))
    wanted = rows.numpy() * np.array([1, 32 / 48, 32 / 24, 32 / 48, 32 / 24, 1])
    wanted[:, [1, 3]] = 32 - wanted[:, [3, 1]]
    np.testing.assert_allclose(moved, wanted, rtol=1e-5)


@pytest.mark.parametrize("stored", ["pillow", "torch"])
def test_augmented_boxes_lie_on_their_objects_and_none_is_degenerate(stored: str) -> None:
    image = torch.zeros(3, 60, 90, dtype=torch.uint8)
    image[0, 10:30, 5:35], image[1, 35:58, 50:85] = 255, 255
    given = Image.fromarray(image.permute(1, 2, 0).numpy()) if stored == "pillow" else image
    rows = torch.tensor([[1, 5, 10, 35, 30, 0], [2, 50, 35, 85, 58, 1]], dtype=torch.float32)
    transform = BoxedTransform(AugmentConfig(random_resized_crop=True, horizontal_flip=0.5, affine=True), PLAIN)
    sizes = set()
    for seed in range(60):
        torch.manual_seed(seed)
        x, moved = transform(given, rows)
        sizes.add(len(moved))
        assert (moved[:, 3:5] - moved[:, 1:3] > 1).all() and 0 <= moved[:, 1:5].min() <= moved[:, 1:5].max() <= 32
        for label, x1, y1, x2, y2, crowd in moved.tolist():
            assert crowd == label - 1
            ys, xs = np.nonzero(x[int(label) - 1].numpy() > 0.5)
            if len(xs):  # a rotated rectangle's box holds its ink, with at most a margin
                ends = np.array([xs.min() - x1, ys.min() - y1, x2 - xs.max() - 1, y2 - ys.max() - 1])
                assert ends.min() > -1.2 and ends.max() < 5
    assert sizes == {1, 2}


def test_a_picture_without_objects_goes_through_every_augmentation() -> None:
    transform = BoxedTransform(AugmentConfig(random_resized_crop=True, horizontal_flip=1.0, affine=True), PLAIN)
    for seed in range(5):
        torch.manual_seed(seed)
        assert transform(squares()[0], torch.zeros(0, 6))[1].shape == (0, 6)


@pytest.mark.parametrize(
    ("name", "value"), [("crop_padding", 2), ("trivial_augment", True), ("random_erasing", 0.5), ("cutout", 4)]
)
def test_what_would_leave_boxes_behind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"data.augment.{name}: has no meaning for boxes"):
        BoxedTransform(AugmentConfig(**{name: value}), PLAIN)


def test_a_size_before_a_crop_has_no_meaning() -> None:
    config = DataConfig(name="canvases", image_size=48, resize_size=50)
    assert "data.resize_size: 50 has no meaning for boxes" in user_error(load_data, config, 0, CPU, False, kind="boxes")


def test_canvases_have_boxes_of_their_ink_and_the_masks_are_those_of_before() -> None:
    config = DataConfig(name="canvases", image_size=48)
    boxes, masks = (build_dataset(config, 0, kind) for kind in ("boxes", "masks"))  # type: ignore[arg-type]
    assert (masks.train.digest(), masks.val.digest()) == ("30c32ba291be0525", "8bdaabdd252dbdab")
    assert isinstance(masks.val, ImageArray) and build_dataset(config, 0).train.kind == "masks"
    data = load_data(config, 0, CPU, False, kind="boxes")
    assert data.kind == "boxes" and data.preprocessing.stretched
    for index in range(60):
        mask, seen = masks.val.labels[index].numpy(), np.zeros((48, 48), bool)
        for label, x1, y1, x2, y2, crowd in boxes.val.sample(index)[1].tolist():
            place = slice(int(y1), int(y2)), slice(int(x1), int(x2))
            ink = mask[place] == label
            assert ink[[0, -1]].any(1).all() and ink[:, [0, -1]].any(0).all() and crowd == 0
            assert (ink | (mask[place] == 0)).all()
            seen[place] |= ink
        assert (seen == (mask > 0)).all()


def test_views_give_pictures_and_rows() -> None:
    data = build_dataset(DataConfig(name="canvases", image_size=48), 0, "boxes")
    view = plain_view(data.val, AugmentConfig(horizontal_flip=0.5), PLAIN)
    samples = view.__getitems__([(0, 1), (3, 2)])
    assert [x.shape for x, _ in samples] == [(3, 32, 32)] * 2 and all(rows.shape[1] == 6 for _, rows in samples)


IMAGES = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
GOOD = [1.0, 0, 0, 4, 4, 0]


@pytest.mark.parametrize(
    ("row", "shape", "said"),
    [
        ([0.0, 0, 0, 4, 4, 0], 6, "a box must be label from 1 to 1"),
        ([2.0, 0, 0, 4, 4, 0], 6, "a box must be label from 1 to 1"),
        ([1.0, 4, 0, 4, 4, 0], 6, "a box must be .*, got .1.0, 4.0"),
        ([1.0, 0, 0, float("inf"), 4, 0], 6, "a box must be"),
        (GOOD, 5, "boxes must be float32 rows of 6 numbers, got Tensor torch.float32"),
    ],
)
def test_wrong_rows_are_one_sentence(row: list[float], shape: int, said: str) -> None:
    rows = torch.tensor([GOOD, row])[:, :shape]
    padded = torch.stack([rows, torch.full_like(rows, -1)])
    for split in (ImageArray(IMAGES, padded), BoxFiles(np.array([b"a", b"b"]), rows, torch.tensor([1, 2]), 2)):
        with pytest.raises(ValueError, match=said):
            Dataset(split, split, ["background", "cat"])


def test_the_rest_of_the_form_is_looked_at_too() -> None:
    rows = torch.tensor([GOOD])
    split = ImageArray(IMAGES, rows.expand(2, 1, 6))
    with pytest.raises(ValueError, match=r"classes\[0\] must be 'background' for boxes, got 'cat'"):
        Dataset(split, split, ["cat", "dog"])
    files = BoxFiles(np.array([b"a", b"b"]), rows, torch.tensor([1, 2]), 2)
    with pytest.raises(ValueError, match=r"ends must be an int64 tensor \(2,\) whose last is 1"):
        Dataset(files, files, ["background", "cat"])


def test_weights_of_runs_before_boxes_are_read_back() -> None:
    about = {"image_size": 32, "resize_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
    about |= {"interpolation": "bilinear", "resized_by": "torch"}
    assert not preprocessing_of(about).stretched and preprocessing_of({**about, "stretched": True}).stretched
