"""Detection: boxes and their classes."""

import contextlib
import io
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.training.errors import UserError
from qat.training.tasks.task import Score, Task

if TYPE_CHECKING:  # it imports torchvision, which takes seconds
    from qat.training.tasks.decoding import Decoder, Found, Outputs, TwoStageNetwork

    Answers = tuple[Outputs, torch.Size]

IMAGE, LABEL, SCORE = 0, 1, 2
"""Columns of counts: an image's number, a label, a score (-1 for a true box); then 1 for a crowd, and a box."""

DETECTIONS = "detections"
"""Output of a file that decodes: image, label, score, left, top, right, bottom in its rows."""


def size_of(answers: "Answers") -> tuple[int, int]:
    """Return height and width of the images."""
    return answers[1][2], answers[1][3]


class Detection(Task):
    """Boxes and their classes, by a detector of torchvision."""

    name, kind, builders = "detection", "boxes", "torchvision.models.detection"
    metric, title, train_metric = "map", "mAP", None
    builder_arguments: ClassVar = {"weights_backbone": None}  # which would be downloaded unasked
    has_classes = False

    def __init__(self, decoder: "Decoder | TwoStageNetwork | None" = None) -> None:
        self.decoder = decoder

    def network(self, model: nn.Module) -> nn.Module:
        """Return backbone and head, which know how to decode what they answer."""
        from qat.training.tasks.decoding import DetectionNetwork, TwoStageNetwork

        if heads := getattr(model, "roi_heads", None):
            if wants := "masks" if heads.has_mask() else "keypoints" if heads.has_keypoint() else "":
                raise UserError(f"model: {type(model).__name__} learns {wants}, which no data set here has; use boxes")
            return TwoStageNetwork(model)
        if absent := [name for name in ("backbone", "head", "anchor_generator") if not hasattr(model, name)]:
            raise UserError(
                f"model: {type(model).__name__} has no {absent[0]}; detection is for detectors of torchvision:"
                " SSD, SSDlite, RetinaNet, FCOS and Faster R-CNN; docs/detection.md has the way of others"
            )
        return DetectionNetwork(model)

    def bound(self, model: nn.Module) -> "Detection":
        return Detection(model.decoder)  # type: ignore[arg-type]

    def answers(self, output: object, images: Tensor) -> "Answers":
        """Return the outputs by name, as float32, and the images' shape."""
        from qat.training.tasks.decoding import OUTPUTS

        outputs: Any = output
        if not isinstance(output, dict):  # of a runtime, in the order of the file's
            outputs = dict(zip(OUTPUTS if len(outputs) > 1 else [DETECTIONS], outputs, strict=False))
        kept = {name: each.float() if isinstance(each, Tensor) else each for name, each in outputs.items()}
        return kept, images.shape

    def training_loss(self, output: object, images: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Any]:
        """Return the sum of the detector's losses, and the answers."""
        answers = self.answers(output, images)
        return self._loss(answers, labels), answers

    def _loss(self, answers: "Answers", labels: Tensor) -> Tensor:
        assert self.decoder is not None
        targets = []
        for rows in labels:
            wanted = rows[(rows[:, 0] >= 0) & (rows[:, 5] == 0)]  # a crowd is nothing to find
            targets.append({"boxes": wanted[:, 1:5], "labels": wanted[:, 0].long()})
        return torch.stack([*self.decoder.losses(answers[0], size_of(answers), targets).values()]).sum()

    def total_loss(self, answers: Any, labels: Tensor) -> Tensor:
        if DETECTIONS in answers[0]:
            return torch.full((), torch.nan)
        return self._loss(answers, labels) * len(labels)

    def correct(self, answers: Any, labels: Tensor) -> Tensor:
        return torch.zeros((), device=labels.device)  # boxes that are kept would cost more than the step

    def classes(self, answers: Any) -> Tensor:
        """Return the class of each anchor; of two stages, that of each image's best box."""
        if "cls_logits" not in answers[0]:
            best = [found["labels"][found["scores"].argsort(descending=True)[:1]] for found in self.boxes(answers)]
            return torch.cat([F.pad(label, (0, 1 - len(label))) for label in best])
        chosen: Tensor = answers[0]["cls_logits"].argmax(2)
        return chosen

    def class_count(self, answers: Any) -> int:
        outputs = answers[0]
        if DETECTIONS in outputs:  # the boxes that it found say no more
            return 0
        return int(outputs["cls_logits"].shape[2] if "cls_logits" in outputs else self.decoder.classes)  # type: ignore[union-attr]

    def boxes(self, answers: Any) -> "list[Found]":
        """Return the boxes of each image, in pixels of the network's images."""
        if DETECTIONS in answers[0]:
            rows, count = answers[0][DETECTIONS], answers[1][0]
            each = [rows[rows[:, 0] == number] for number in range(count)]
            return [{"labels": found[:, 1].long(), "scores": found[:, 2], "boxes": found[:, 3:]} for found in each]
        if self.decoder is None:
            raise UserError("RUN: a file alone does not say how its boxes are decoded; give the folder of its run")
        return self.decoder.boxes(answers[0], size_of(answers))

    def counts(self, answers: Any, labels: Tensor) -> Tensor:
        """List the boxes that were found, and the true ones: float64 (rows, 8)."""
        rows = []
        for number, (found, true) in enumerate(zip(self.boxes(answers), labels, strict=True)):
            true = true[true[:, 0] >= 0]
            image, none = (torch.full((len(each), 1), float(number)) for each in (found["boxes"], true))
            scores = torch.stack((found["labels"], found["scores"], torch.zeros_like(found["scores"])), 1).cpu()
            rows.append(torch.cat((image, scores, found["boxes"].cpu()), 1))
            rows.append(torch.cat((none, true[:, :1].cpu(), none * 0 - 1, true[:, 5:].cpu(), true[:, 1:5].cpu()), 1))
        # The first row keeps how many images and classes there are.
        head = torch.tensor([[len(labels) - 1.0, -1.0, self.class_count(answers), *[0.0] * 5]])
        return torch.cat([head, *rows]).double()

    def merged(self, counts: list[Tensor]) -> Tensor:
        """Number the images of all batches, and return all rows."""
        first, numbered = 0.0, list[Tensor]()
        for rows in counts:
            numbered.append(rows.clone())
            numbered[-1][:, IMAGE] += first
            first = float(numbered[-1][:, IMAGE].max()) + 1
        return torch.cat(numbered)

    def score(self, counts: Tensor) -> Score:
        """Return COCO's mean of the average precisions at overlaps of 0.5 to 0.95, by faster-coco-eval."""
        from faster_coco_eval import COCO, COCOeval_faster

        rows, classes = counts[counts[:, LABEL] >= 0], int(counts[counts[:, LABEL] < 0, SCORE].max())
        classes = max(classes, int(counts[:, LABEL].max()) + 1)
        entries = []
        for number, (image, label, score, crowd, left, top, right, bottom) in enumerate(rows.tolist(), 1):
            size = {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
            entries.append({"id": number, "image_id": int(image), "category_id": int(label), "score": score, **size})
            entries[-1]["iscrowd"] = int(crowd)
        true, found = ([each for each in entries if (each["score"] < 0) == kind] for kind in (True, False))
        images = [{"id": number} for number in range(int(counts[:, IMAGE].max()) + 1)]
        categories = [{"id": number} for number in range(1, classes)]
        with contextlib.redirect_stdout(io.StringIO()):
            truth = COCO({"images": images, "annotations": true, "categories": categories})
            if not (true and found):
                return Score(0.0, 0.0, (float("nan"),) * classes)
            judged = COCOeval_faster(truth, truth.loadRes(found), "bbox")
            judged.evaluate()
            judged.accumulate()
        precision = torch.as_tensor(judged.eval["precision"])[..., 0, -1]  # of all sizes, with 100 boxes an image
        known = precision.flatten(0, 1).amin(0) >= 0  # -1 for a class without boxes
        by_class = torch.where(known, 100 * precision.mean((0, 1)), torch.nan)
        return Score(float(by_class[known].mean()), 0.0, (float("nan"), *by_class.tolist()))
