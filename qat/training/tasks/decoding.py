"""A detector's own losses and boxes, from the outputs of the network that is quantized."""

import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

Outputs: TypeAlias = dict[str, Tensor]
"""A network's outputs by name: logits (N, anchors, classes), offsets (N, anchors, 4), centerness (N, anchors, 1)."""

Found: TypeAlias = dict[str, Tensor]
"""Boxes (n, 4) in pixels, their labels (n,) and scores (n,)."""

OUTPUTS = ("cls_logits", "bbox_regression", "bbox_ctrness")
"""Outputs of a network in their order; FCOS alone has the last."""


FOUND = "boxes"
"""Key of what a network of two stages has found."""


class DetectionNetwork(nn.Module):
    """Backbone and head of a one-stage detector of torchvision: from images to tensors."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head
        self.decoder = Decoder(detector)

    def forward(self, images: Tensor) -> Outputs:
        found = self.head(list(self.backbone(images).values()))
        return {name: found[name] for name in OUTPUTS if name in found}


class TwoStageNetwork(nn.Module):
    """Faster R-CNN of torchvision for images that have their size already.

    It decides on boxes between its parts, which are quantized one by one: no graph holds all of it. While gradients are
    recorded in training, it stops after the backbone, since all that follows needs the true boxes: `losses`.
    """

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone, self.rpn, self.roi_heads = detector.backbone, detector.rpn, detector.roi_heads
        self.classes: int = self.roi_heads.box_predictor.cls_score.out_features

    @property
    def decoder(self) -> "TwoStageNetwork":
        """The network itself, which has the methods of `Decoder`."""
        return self

    def forward(self, images: Tensor) -> dict[str, Any]:
        maps = self.backbone(images)
        if self.training and torch.is_grad_enabled():
            return dict(maps)
        return {**maps, FOUND: self._run(False, maps, (images.shape[2], images.shape[3]), None)[0]}

    def losses(self, outputs: dict[str, Any], size: tuple[int, int], targets: list[Found]) -> Outputs:
        """Return the detector's losses by name, means over the batch."""
        return self._run(True, {name: each for name, each in outputs.items() if name != FOUND}, size, targets)[1]

    def boxes(self, outputs: dict[str, Any], size: tuple[int, int]) -> list[Found]:
        """Return the boxes of each image, after non-maximum suppression."""
        found: list[Found] = outputs[FOUND]
        return found

    def _run(
        self, learning: bool, maps: Outputs, size: tuple[int, int], targets: list[Found] | None
    ) -> tuple[list[Found], Outputs]:
        deciding, count = (self.rpn, self.roi_heads), len(next(iter(maps.values())))
        before = [each.training for each in deciding]
        images = ImageList(next(iter(maps.values())).new_zeros(()).expand(count, 3, *size), [size] * count)
        for each in deciding:  # without their layers: it says whether they lose or find
            each.training = learning
        try:
            proposals, first = self.rpn(images, maps, targets)
            found, second = self.roi_heads(maps, proposals, images.image_sizes, targets)
        finally:
            for each, mode in zip(deciding, before, strict=True):
                each.training = mode
        return found, {**second, **first}  # in the order in which the detector adds them


class Decoder:
    """A detector without its weights, run on outputs that its network has computed.

    Its own forward matches anchors, computes losses, and keeps boxes: where it calls its backbone, it gets maps without
    values, and where it calls its head, the outputs.
    """

    def __init__(self, detector: Any) -> None:
        self.detector = copy.deepcopy(detector).to("meta")
        self.backbone = self.detector.backbone
        self.detector.transform, self.detector.backbone = _Prepared(), nn.Identity()
        self.sizes: dict[tuple[int, ...], dict[str, torch.Size]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "Decoder":
        return self  # it has no state that a copy would change

    def losses(self, outputs: Outputs, size: tuple[int, int], targets: list[Found]) -> Outputs:
        """Return the detector's losses by name, means over the batch."""
        losses: Outputs = self._run(self.detector.train(), outputs, size, targets)
        return losses

    def boxes(self, outputs: Outputs, size: tuple[int, int]) -> list[Found]:
        """Return the boxes of each image, after non-maximum suppression."""
        found: list[Found] = self._run(self.detector.eval(), outputs, size, None)
        return found

    def anchors(self, size: tuple[int, int]) -> Tensor:
        """Return the anchors of an image in the order of the outputs, (A, 4) in pixels."""
        maps = list(self._maps(size, 1, torch.device("cpu")).values())
        (found,) = self.detector.anchor_generator(ImageList(torch.zeros(1, 3, *size), [size]), maps)
        anchors: Tensor = found
        return anchors

    def _maps(self, size: tuple[int, int], count: int, device: torch.device) -> dict[str, Tensor]:
        if size not in self.sizes:
            with torch.no_grad():
                maps = self.backbone.eval()(torch.empty(1, 3, *size, device="meta"))
            self.sizes[size] = {name: each.shape for name, each in maps.items()}
        nothing = torch.zeros((), device=device)
        return {name: nothing.expand(count, *shape[1:]) for name, shape in self.sizes[size].items()}

    def _run(self, detector: Any, outputs: Outputs, size: tuple[int, int], targets: list[Found] | None) -> Any:
        count, device = len(outputs[OUTPUTS[0]]), outputs[OUTPUTS[0]].device
        maps = self._maps(size, count, device)
        detector.backbone.forward = lambda images: maps
        detector.head.forward = lambda features: {name: each.float() for name, each in outputs.items()}
        try:
            return detector([torch.zeros((), device=device).expand(3, *size)] * count, targets)
        finally:
            del detector.backbone.forward, detector.head.forward


class _Prepared(nn.Module):
    # In place of the detector's transform: images have the network's size already.
    def forward(self, images: list[Tensor], targets: Any) -> tuple[ImageList, Any]:
        return ImageList(torch.stack(images), [tuple(each.shape[1:]) for each in images]), targets

    def postprocess(self, result: Any, *sizes: Any) -> Any:
        return result
