"""Segmentation from the YAML: masks, mean intersection over union, and a run to the proof."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qat.cli.command import main as verb
from qat.training.config.file import load_config
from qat.training.config.schema import AugmentConfig, DataConfig
from qat.training.data.datasets import build_dataset
from qat.training.data.masks import MaskedTransform
from qat.training.data.transforms import Preprocessing
from qat.training.errors import UserError
from qat.training.run.folder import read_summary
from qat.training.script import run
from qat.training.tasks.known import CLASSIFICATION, SEGMENTATION, task_of
from qat.training.tasks.labels import IGNORED


def test_mean_iou_is_an_independent_count() -> None:
    rng = np.random.default_rng(0)
    truths, logits = rng.integers(0, 5, (6, 9, 7)), rng.normal(size=(6, 6, 9, 7)).astype(np.float32)
    truths[rng.random(truths.shape) < 0.2] = IGNORED
    answers, shares = logits.argmax(1), []
    for kind in range(6):
        counted = truths != IGNORED
        both = ((answers == kind) & (truths == kind) & counted).sum()
        either = (((answers == kind) | (truths == kind)) & counted).sum()
        shares.append(both / either)
    parts = [SEGMENTATION.counts(torch.tensor(logits[k : k + 2]), torch.tensor(truths[k : k + 2])) for k in (0, 2, 4)]
    score = SEGMENTATION.score(SEGMENTATION.merged(parts))
    assert score.by_class == pytest.approx([100 * each for each in shares])
    assert score.value == pytest.approx(100 * np.mean(shares))
    right = ((answers == truths)[truths != IGNORED]).mean()
    found = SEGMENTATION.correct(torch.tensor(logits), torch.tensor(truths))
    assert float(found) / 6 == pytest.approx(right)


def test_ignored_pixels_have_no_part_in_the_loss() -> None:
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))
    labels[0, 0] = IGNORED
    wanted = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)
    assert torch.allclose(SEGMENTATION.loss(logits, labels), wanted)
    assert float(SEGMENTATION.loss(logits, torch.full_like(labels, IGNORED))) == 0.0


def test_the_builder_says_the_task() -> None:
    names = ("resnet18", "fcn_resnet50", "timm/resnet18", "a.b:c")
    assert [task_of(name, None).name for name in names] == ["classification", "segmentation", *["classification"] * 2]
    assert task_of("a.b:c", "segmentation") is SEGMENTATION and task_of("resnet18", None) is CLASSIFICATION


def test_canvases_are_the_same_each_time_and_no_digit_is_in_both_splits() -> None:
    one, two = (build_dataset(DataConfig(name="canvases", image_size=48), seed) for seed in (0, 1))
    assert torch.equal(one.train.images, two.train.images) and torch.equal(one.val.labels, two.val.labels)
    assert one.train.labels.unique().tolist() == list(range(11)) and one.classes[:2] == ["background", "0"]


def test_image_and_mask_move_together() -> None:
    augment = AugmentConfig(random_resized_crop=True, crop_padding=4, horizontal_flip=0.5, affine=True)
    mask = torch.zeros(40, 50, dtype=torch.uint8)
    mask[10:30, 5:20] = 1
    image = (mask * 255).expand(3, -1, -1).contiguous()
    transform = MaskedTransform(augment, Preprocessing(32, 32, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    for seed in range(20):
        torch.manual_seed(seed)
        x, labels = transform(image, mask)
        counted = labels != IGNORED
        assert ((x[0] > 0.5) == (labels == 1))[counted].double().mean() > 0.95  # edges are interpolated


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    small = "data.limit_train=8 data.limit_val=4 data.image_size=32 float.warmup_epochs=0 float.epochs=1 qat.epochs=1"
    config = load_config("digits_segmentation.yaml", [*small.split(), f"run_dir={folder}"], Path("configs"))
    assert run(config) == 0
    return folder


def test_a_run_ends_with_a_proof_of_masks(finished: Path) -> None:
    summary = read_summary(finished)
    assert summary is not None and {"miou", "by_class"} <= summary["qat"].keys()
    assert summary["onnx"]["agreement"] > 0.99 and summary["onnx"]["miou"] == pytest.approx(
        summary["qat"]["miou"], abs=1
    )
    assert "mIoU" in (finished / "report.html").read_text()


def test_the_report_shows_masks_and_each_class(finished: Path) -> None:
    found = json.loads((finished / "analysis.json").read_text())["pictures"]
    assert found["columns"] == ["truth", "float", "QAT", "model.onnx"] and len(found["differing"]) == 4
    with Image.open(finished / "answers.png") as drawn:
        assert drawn.size == (4 * 226 + 2, 4 * 226 + 2)
    for result in map((read_summary(finished) or {}).get, ("float", "calibrated", "qat")):
        assert result is not None
        assert result["miou"] == pytest.approx(np.mean([x for x in result["by_class"].values() if x is not None]))
    text = (finished / "report.html").read_text()
    assert '<section id="pictures"' in text and '<section id="classes"' in text


def test_the_verbs_know_masks(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(picture)
    assert verb(["predict", str(finished), str(picture), "--to", str(tmp_path / "drawn")]) == 0
    with Image.open(tmp_path / "drawn" / "photo_classes.png") as drawn:
        assert drawn.size == (32, 32)
    assert verb(["evaluate", str(finished), "data.limit_val=2"]) == 0 and "mIoU %" in capsys.readouterr().out
    assert verb(["export", str(finished), "--to", str(tmp_path / "again.onnx")]) == 0
    assert verb(["verify", str(finished)]) == 0 and "top1" not in (said := capsys.readouterr().out) and "mIoU" in said
    assert verb(["sensitivity", str(finished)]) != 0 and "is for classifiers" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for kind, shape in (("images", (20, 30, 3)), ("masks", (20, 30))):
            (tmp_path / split / kind).mkdir(parents=True)
            for name in "ab":
                Image.fromarray(np.zeros(shape, np.uint8)).save(tmp_path / split / kind / f"{name}.png")
    (tmp_path / "classes.txt").write_text("ground\nroad\n")
    return tmp_path


def test_masks_are_read_beside_their_images(folder: Path) -> None:
    found = build_dataset(DataConfig(name="masks", root=str(folder)), 0)
    picture, mask = found.val.sample(1)
    assert picture.size == (30, 20) and mask.shape == (20, 30) and found.classes == ["ground", "road"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda f: (f / "classes.txt").unlink(), "expected the name of each class on a line"),
        (lambda f: (f / "train/masks/b.png").unlink(), "b has no mask"),
        (lambda f: (f / "val/masks/a.png").write_bytes(b"no image"), "not a readable mask"),
        (lambda f: Image.fromarray(np.full((20, 30), 7, np.uint8)).save(f / "val/masks/a.png"), "has the class 7"),
        (lambda f: Image.fromarray(np.zeros((9, 9), np.uint8)).save(f / "val/masks/a.png"), "is of 9 x 9 pixels"),
        (lambda f: Image.new("RGB", (30, 20)).save(f / "val/masks/a.png"), "one number of 8 bits a pixel"),
    ],
)
def test_a_broken_folder_of_masks_is_one_sentence(folder: Path, broken: object, said: str) -> None:
    assert callable(broken)
    broken(folder)
    with pytest.raises(UserError, match=said):
        build_dataset(DataConfig(name="masks", root=str(folder)), 0).val.sample(0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.name=resnet18"], "has a class for each pixel, and resnet18 is for classification"),
        (["data.name=digits"], "has a class for each image, and lraspp_mobilenet_v3_large is for segmentation"),
        (["float.mixup_alpha=0.2"], "float.mixup_alpha: is for classification"),
        (["data.augment.cutout=8"], "data.augment.cutout: has no meaning for masks"),
        (["model.name=lraspp_mobilenet_v3"], "did you mean"),
    ],
)
def test_what_does_not_fit_is_said_before_training(changes: list[str], said: str, tmp_path: Path) -> None:
    config = load_config("digits_segmentation.yaml", [*changes, f"run_dir={tmp_path / 'run'}"], Path("configs"))
    with pytest.raises(UserError, match=said):
        run(config)
    assert not (tmp_path / "run").exists()
