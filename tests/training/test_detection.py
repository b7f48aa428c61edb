"""Detection from the YAML: a detector's own losses and boxes, mean average precision, and a run to the proof."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models import get_model
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FrozenBatchNorm2d

from qat.cli.command import main as verb
from qat.export.onnxruntime.session import open_session
from qat.training.config.file import load_config
from qat.training.config.schema import DataConfig
from qat.training.config.stages import ModelConfig
from qat.training.data.loaders import load_data
from qat.training.errors import UserError
from qat.training.model import build_model
from qat.training.run.folder import read_summary
from qat.training.script import run
from qat.training.tasks.detection import Detection
from qat.training.tasks.known import DETECTION, task_of
from qat.training.tasks.task import Task

SSDLITE, SIDE = "ssdlite320_mobilenet_v3_large", 64


def _as_given(detector: Any) -> nn.Module:
    # The detector takes images as the data set gives them: resized and normalised.
    detector.transform = GeneralizedRCNNTransform(SIDE, SIDE, [0.0] * 3, [1.0] * 3, 1, fixed_size=(SIDE, SIDE))
    assert isinstance(detector, nn.Module)
    return detector


def _targets(rows: Tensor) -> list[dict[str, Tensor]]:
    kept = [each[(each[:, 0] >= 0) & (each[:, 5] == 0)] for each in rows]
    return [{"boxes": each[:, 1:5], "labels": each[:, 0].long()} for each in kept]


@pytest.fixture(scope="module", params=[SSDLITE, "retinanet_resnet50_fpn_v2", "fcos_resnet50_fpn"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Task]:
    torch.manual_seed(0)
    detector: Any = _as_given(get_model(request.param, weights=None, weights_backbone=None, num_classes=4))
    detector.score_thresh = 0.0  # an untrained one is sure of nothing
    network = DETECTION.network(copy.deepcopy(detector))
    return detector, network, DETECTION.bound(network)


ROWS = torch.tensor([
    [[1, 4, 5, 40, 60, 0], [3, 20, 10, 50, 30, 0], [2, 0, 0, 64, 64, 1]],
    [[-1, -1, -1, -1, -1, -1]] * 3,
]).float()  # fmt: skip
"""Boxes of two images: of the first two objects and a crowd, of the second none."""


def _same_answers(detector: Any, network: nn.Module, task: Any) -> Any:
    """Compare losses and boxes to the bit; return the answers."""
    images = torch.randn(2, 3, SIDE, SIDE)
    for _ in range(2):  # statistics of BatchNorm
        torch.manual_seed(1)  # of two stages: it draws which proposals it learns from
        wanted = sum(detector.train()(list(images), _targets(ROWS)).values())
        torch.manual_seed(1)
        loss, _ = task.training_loss(network.train()(images), images, ROWS, 0.0)
        assert float(loss.detach()) == float(wanted.detach())
    with torch.no_grad():
        answers = task.answers(network.eval()(images), images)
        for one, other in zip(detector.eval()(list(images)), task.boxes(answers), strict=True):
            assert len(one["boxes"]) and all(torch.equal(one[key], other[key]) for key in one)
        assert float(task.total_loss(answers, ROWS)) > 0
    return answers


def test_losses_and_boxes_are_the_detectors_own(pair: tuple[Any, nn.Module, Detection]) -> None:
    _same_answers(*pair)


def test_twenty_steps_have_the_losses_of_a_plain_loop_of_torchvision() -> None:
    canvases = DataConfig(name="canvases", image_size=SIDE, batch_size=4, limit_train=80)
    data = load_data(canvases, 0, torch.device("cpu"), False, "boxes")
    torch.manual_seed(0)
    network = build_model(ModelConfig(name=SSDLITE), 11)
    torch.manual_seed(0)
    detector = _as_given(get_model(SSDLITE, weights=None, weights_backbone=None, num_classes=11))
    task, losses = DETECTION.bound(network), list[list[float]]()
    for model in (network, detector):
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01, momentum=0.9)
        losses.append([])
        for images, rows in data.train:
            if model is network:
                loss, _ = task.training_loss(network(images), images, rows, 0.0)
            else:
                loss = sum(detector(list(images), _targets(rows)).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert len(losses[0]) == 20 and losses[0] == losses[1]
    assert losses[0][-1] < 0.8 * losses[0][0]


def _average_precisions(truths: np.ndarray, found: np.ndarray, classes: int) -> float:
    # COCO's, in plain NumPy: rows are image, label, score, box.
    def overlap(box: np.ndarray, others: np.ndarray) -> np.ndarray:
        low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
        shared = np.clip(high - low, 0, None).prod(1)
        return shared / ((box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - shared)

    shares = []
    for label in range(1, classes):
        wanted, answers = (each[each[:, 1] == label] for each in (truths, found))
        answers = answers[np.argsort(-answers[:, 2], kind="stable")]
        for least in np.arange(0.5, 1.0, 0.05):
            taken, right = np.zeros(len(wanted), bool), []
            for answer in answers:
                overlaps = np.where((wanted[:, 0] == answer[0]) & ~taken, overlap(answer[3:], wanted[:, 3:]), 0)
                right.append(overlaps.max() >= least)
                taken[overlaps.argmax()] |= right[-1]
            hits = np.cumsum(right)
            recall, precision = hits / len(wanted), hits / np.arange(1, len(right) + 1)
            best = np.maximum.accumulate(precision[::-1])[::-1]
            places = np.searchsorted(recall, np.linspace(0, 1, 101))
            shares.append(np.append(best, 0)[np.minimum(places, len(best))].mean())
    return float(100 * np.mean(shares))


class _Given(Detection):
    """The boxes that are given."""

    def __init__(self, boxes: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self.given = boxes

    def boxes(self, answers: Any) -> list[dict[str, Tensor]]:
        return [self.given[number] for number in answers[1]]


def test_mean_average_precision_is_an_independent_count_over_uneven_batches() -> None:
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 50, (30, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(8, 30, (30, 2))], 1)
    truths = np.column_stack([rng.integers(0, 7, 30), rng.integers(1, 4, 30), np.ones(30), boxes])
    near = np.repeat(truths, 3, 0)
    near[:, 3:] += rng.normal(size=(90, 4)) * 2
    near[:, 2], near[::7, 1] = rng.uniform(0.1, 1, 90), 1
    rows = torch.full((7, 30, 6), -1.0)
    for number in range(7):
        mine = truths[truths[:, 0] == number]
        rows[number, : len(mine)] = torch.tensor(np.column_stack([mine[:, 1], mine[:, 3:], mine[:, 2] * 0])).float()
    found = [
        {"boxes": mine[:, 3:], "labels": mine[:, 1].long(), "scores": mine[:, 2]}
        for mine in (torch.tensor(near[near[:, 0] == number]) for number in range(7))
    ]
    task, logits = _Given(found), {"cls_logits": torch.zeros(1, 1, 4)}

    def counted(*numbers: int) -> Tensor:
        return task.counts((logits, numbers), rows[list(numbers)])

    ranks = [task.merged([counted(0), counted(1, 2, 3)]), counted(4), counted(5, 6)]
    score = task.score(task.merged(ranks))
    assert score.value == pytest.approx(_average_precisions(truths, near, 4), abs=1e-4) and 20 < score.value < 90
    assert np.isnan(score.by_class[0]) and np.mean(score.by_class[1:]) == pytest.approx(score.value)


def test_a_crowd_is_nothing_to_find_and_no_mistake_to_find() -> None:
    one = {"boxes": torch.tensor([[0.0, 0, 20, 20], [30, 30, 60, 60]]), "labels": torch.tensor([1, 1])}
    task, logits = _Given([{**one, "scores": torch.tensor([0.9, 0.95])}]), {"cls_logits": torch.zeros(1, 1, 3)}
    rows = torch.tensor([[[1, 0, 0, 20, 20, 0], [1, 30, 30, 60, 60, 1]]]).float()
    assert task.score(task.counts((logits, [0]), rows)).value == pytest.approx(100)
    rows[0, 1, 5] = -1  # nothing there: the surer box is wrong
    rows[0, 1, 0] = -1
    assert task.score(task.counts((logits, [0]), rows)).value == pytest.approx(50, abs=1)
    assert task.score(task.counts((logits, [0]), rows[:, :0])).value == 0  # no true box at all


def test_what_a_file_never_finds_counts_as_missed() -> None:
    task, size = Detection(), torch.Size((2, 3, 64, 64))
    rows = torch.tensor([[[1, 0, 0, 20, 20, 0]], [[3, 30, 30, 60, 60, 0]]]).float()
    for found, wanted in ((torch.tensor([[0, 1, 0.9, 0, 0, 20, 20]]), 50.0), (torch.zeros(0, 7), 0.0)):
        assert task.score(task.counts(({"detections": found}, size), rows)).value == pytest.approx(wanted)


def test_two_stages_have_the_detectors_own_losses_and_boxes() -> None:
    torch.manual_seed(0)
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    detector: Any = _as_given(get_model(name, weights=None, weights_backbone=None, num_classes=4))
    network = DETECTION.network(copy.deepcopy(detector))
    task = DETECTION.bound(network)
    answers = _same_answers(detector, network, task)
    assert not network.rpn.training
    assert task.class_count(answers) == 4 and task.classes(answers).shape == (2,)


def test_pretrained_detectors_get_new_heads_and_keep_what_their_weights_change() -> None:
    config = ModelConfig(name="retinanet_resnet50_fpn", weights="DEFAULT")
    model = build_model(config, 5, with_weights=False).eval()
    frozen = [each for each in model.modules() if isinstance(each, FrozenBatchNorm2d)]
    assert len(frozen) == 53 and all(each.eps == 0 for each in frozen)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, SIDE, SIDE))["cls_logits"].shape[2] == 5


def test_the_builder_says_the_task() -> None:
    assert [task_of(name, None).name for name in ("ssd300_vgg16", "fcos_resnet50_fpn")] == ["detection"] * 2
    assert task_of("a.b:c", "detection") is DETECTION


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    small = "data.limit_train=16 data.limit_val=6 data.image_size=64 data.batch_size=4 float.warmup_epochs=0"
    changes = [*small.split(), "float.epochs=2", "qat.epochs=1", "export.end_to_end=true"]
    changes.append("model.kwargs={score_thresh: 0.0}")
    assert run(load_config("digits_detection.yaml", [*changes, f"run_dir={folder}"], Path("configs"))) == 0
    return folder


def test_a_run_ends_with_a_proof_of_boxes(finished: Path) -> None:
    summary = read_summary(finished)
    assert summary is not None and {"map", "by_class"} <= summary["qat"].keys()
    assert summary["onnx"]["agreement"] > 0.99
    assert summary["onnx"]["map"] == pytest.approx(summary["qat"]["map"], abs=1)
    assert "mAP" in (finished / "report.html").read_text()


def test_a_file_of_its_own_answers_with_the_models_boxes(finished: Path, tmp_path: Path) -> None:
    import qat

    model = qat.load(finished)
    task = DETECTION.bound(model)
    data = load_data(DataConfig(name="canvases", image_size=SIDE, limit_val=3), 0, torch.device("cpu"), True, "boxes")
    images, _ = next(iter(data.val))
    with torch.no_grad():
        wanted = task.boxes(task.answers(model(images), images))
    session = open_session(finished / "end_to_end.onnx")
    (rows,) = session.run(["detections"], {"images": images.contiguous().numpy()})
    assert (np.diff(rows[:, 2]) <= 0).all() and rows.shape[1] == 7
    for number, boxes in enumerate(wanted):
        mine = rows[rows[:, 0] == number]
        for label, score, box in list(zip(boxes["labels"], boxes["scores"], boxes["boxes"], strict=True))[:20]:
            off = np.abs(mine[:, 3:] - box.numpy()).max(1) + 100 * (mine[:, 1] != int(label))
            assert off.min() < 0.05 and abs(mine[off.argmin(), 2] - float(score)) < 1e-3
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"])[1] == "0"
    picture = _photo(tmp_path)
    assert verb(["predict", str(finished / "end_to_end.onnx"), str(picture), "--to", str(tmp_path), "--json"]) == 0


def test_the_page_reads_boxes_without_torch(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits_detection").symlink_to(finished)
    _photo(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "detection.md").read_text()
    (code,) = re.findall(r"```python sketch\n(# read_boxes.py.*?)```", page, re.DOTALL)
    code = code.replace("> 0.5", "> 0.01") + "\nimport sys\nassert 'torch' not in sys.modules\n"
    shown = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert all(len(line.split()) == 6 for line in shown.stdout.splitlines()) and shown.stdout


def _photo(folder: Path) -> Path:
    path = folder / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(path)
    return path


def test_the_verbs_know_boxes(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["predict", str(finished), str(_photo(tmp_path)), "--to", str(tmp_path / "drawn"), "--score", "0", "--json"]
    assert verb([*said, "--compare"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["boxes"]["onnxruntime"] and answer["boxes"].keys() == {"onnxruntime", "float"}
    assert all(0 <= side <= 80 for each in answer["boxes"]["float"] for side in each["box"])
    with Image.open(tmp_path / "drawn" / "photo_boxes.png") as drawn:
        assert drawn.size == (80, 60)
    assert verb(["predict", str(finished), "a/photo.png", "b/photo.jpg"]) != 0
    assert "two pictures have one name" in capsys.readouterr().err
    assert verb(["evaluate", str(finished), "data.limit_val=2"]) == 0 and "mAP %" in capsys.readouterr().out
    assert verb(["verify", str(finished)]) == 0 and "top1" not in capsys.readouterr().out
    assert verb(["predict", str(finished / "model.onnx"), str(_photo(tmp_path))]) != 0
    assert "give the folder of its run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.name=resnet18", "data.name=yolo", "data.root=nowhere"], "nowhere"),
        (["data.name=digits"], "has a class for each image, and ssdlite320_mobilenet_v3_large is for detection"),
        (["float.mixup_alpha=0.2"], "float.mixup_alpha: is for classification"),
        (["data.augment.cutout=8"], "data.augment.cutout: has no meaning for boxes"),
        (["model.name=ssdlite320_mobilenet"], "did you mean"),
        (["model.name=fasterrcnn_mobilenet_v3_large_320_fpn"], "set export.onnx=false"),
        (["model.name=maskrcnn_resnet50_fpn"], "learns masks, which no data set here has"),
        (["model.name=lraspp_mobilenet_v3_large", "export.end_to_end=true"], "export.end_to_end: is for detection"),
    ],
)
def test_what_does_not_fit_is_said_before_training(changes: list[str], said: str, tmp_path: Path) -> None:
    config = load_config("digits_detection.yaml", [*changes, f"run_dir={tmp_path / 'run'}"], Path("configs"))
    with pytest.raises(UserError, match=said):
        run(config)
    assert not (tmp_path / "run").exists()
