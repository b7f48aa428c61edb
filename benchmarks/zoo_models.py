"""torchvision's models with random weights, each with the smallest input that runs in training and in evaluation.

Those of other libraries are in `benchmarks.zoo_libraries`; such a model is called "timm/resnet18".
"""

import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torchvision.models as zoo
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.zoo_libraries import NAMES, build_from
from qat.contexts import first_calls
from qat.inputs import Inputs, call_model, copied

FAMILIES: dict[str, ModuleType] = {
    "classification": zoo,
    "segmentation": zoo.segmentation,
    "detection": zoo.detection,
    "video": zoo.video,
    "optical_flow": zoo.optical_flow,
}

BATCH = 2
"""Two, so that BatchNorm has something to average where a map is a single pixel."""

IMAGE_SIZES = {
    "alexnet": 224,  # its pooling to a fixed 6 x 6 is the identity at this size only
    "vgg": 224,  # likewise, 7 x 7
    "googlenet": 96,  # 3 x 3 features: an average of 2 x 2 has exact ties, which ONNX Runtime rounds the other way
    "inception_v3": 299,  # the auxiliary classifier of training needs 17 x 17 features
    "maxvit": 224,  # its four stages must split into windows of 7
    "swin": 96,  # the smallest at which windows are shifted and padded
    "vit_h_14": 56,
}
"""Name or its beginning to image size; 64 for all others."""

CLIPS = {"s3d": (16, 224), "swin3d": (8, 96), "mvit": (16, 224)}
"""Name or its beginning to frames and image size; (8, 64) for all others.

s3d ends in a fixed pooling of 2 x 7 x 7; the builders of mvit fix its size.
"""

FEW_REGIONS = {
    "rpn_post_nms_top_n_train": 64, "rpn_post_nms_top_n_test": 16, "box_batch_size_per_image": 32,
    "box_score_thresh": 0.0,
}  # fmt: skip
"""What two-stage detectors look at closely: few regions, for a thousand an image would only cost time, and whatever
their score, for fresh weights are sure of nothing and the heads behind would see no region at all."""


@dataclass
class Case:
    """A float model and what to run it on."""

    model: nn.Module  # in evaluation mode, its BatchNorm statistics fit to inputs like these
    inputs: Inputs
    targets: list[dict[str, Tensor]] | None = None  # what a detection model wants besides in training
    untrained: tuple[str, ...] = ()
    """Modules that training does not run, or that no gradient reaches: YOLO's decoding of boxes, a dropped pooling."""

    @property
    def shapes(self) -> list[list[int]]:
        """The shape of every input tensor."""
        return [list(tensor.shape) for tensor in tree_leaves(self.inputs)]

    @property
    def training_inputs(self) -> Inputs:
        """The inputs, with the targets where there are some."""
        return self.inputs if self.targets is None else (*self.inputs, self.targets)

    def loss(self, model: nn.Module) -> Tensor:
        """The losses that a model returns for targets, or else the mean squares of its outputs, added up."""
        found = tree_leaves(call_model(model, copied(self.training_inputs)))
        leaves = [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return torch.stack([leaf.square().mean() if self.targets is None else leaf for leaf in leaves]).sum()


def names_of(family: str) -> list[str]:
    """The registered names of a family, or those that are measured of a library, in alphabetical order."""
    if family in NAMES:
        return [f"{family}/{name}" for name in NAMES[family]]
    return sorted(zoo.list_models(module=FAMILIES[family]))


def family_of(name: str) -> str:
    """The family that a name is registered in; the library of a name such as timm/resnet18."""
    library, _, name = name.rpartition("/")
    return library or next(family for family in FAMILIES if name in names_of(family))


def build(name: str, seed: int = 0) -> Case:
    """The model with random weights and its example inputs.

    Fresh networks are degenerate in ways that trained ones are not, which would make a comparison of outputs say
    nothing: deep ones fade to 1e-15 (EfficientNet), ViT's head is zero, ConvNeXt's blocks are scaled by 1e-6. So
    weights that are all zero are drawn at random, the layer scale is set to 1, and BatchNorm's statistics are fit in
    two passes in training mode.
    """
    torch.manual_seed(seed)
    family = family_of(name)
    if family in NAMES:
        model, inputs = build_from(family, name.rpartition("/")[2])
        return _fit(Case(model, inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GoogLeNet and Inception announce a slow initialisation
        model = zoo.get_model(name, **_options(name, family))
    return _fit(Case(model, _inputs(name, family), _targets(name) if family == "detection" else None))


def _fit(case: Case) -> Case:
    _enliven(case.model)
    case.untrained = _untrained(case)
    _fit_norms(case)
    case.model.eval()
    return case


def _untrained(case: Case) -> tuple[str, ...]:
    names = {module: name for name, module in case.model.named_modules()}
    ran, differentiable, reached = set[nn.Module](), set[nn.Module](), set[nn.Module]()

    def follow(module: nn.Module, args: Any, answer: Any) -> None:
        ran.add(module)
        for leaf in tree_leaves(answer):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                differentiable.add(module)
                leaf.register_hook(lambda gradient: reached.add(module))

    handles = [module.register_forward_hook(follow) for module in names]
    case.loss(case.model.train()).backward()
    for handle in handles:
        handle.remove()
    case.model.zero_grad(set_to_none=True)
    with torch.no_grad(), first_calls(names) as evaluated:
        call_model(case.model.eval(), copied(case.inputs))
    return tuple(names[each] for each in names if each in differentiable - reached or each in evaluated.keys() - ran)


def _options(name: str, family: str) -> dict[str, Any]:
    options: dict[str, Any] = {"weights": None}
    if family in ("segmentation", "detection"):
        options["weights_backbone"] = None
    if name.startswith("vit"):
        options["image_size"] = _image_size(name)
    if family == "detection" and not name.startswith("ssd"):
        options |= {"min_size": 96, "max_size": 128}
    if "rcnn" in name:
        options |= FEW_REGIONS
    return options


def _inputs(name: str, family: str) -> tuple[Any, ...]:
    if family == "video":
        frames, size = next((clip for start, clip in CLIPS.items() if name.startswith(start)), (8, 64))
        batch = 1 if name.startswith("mvit") else BATCH  # large, and without BatchNorm
        return (torch.randn(batch, 3, frames, size, size),)
    if family == "optical_flow":
        return tuple(torch.rand(BATCH, 3, 128, 128) * 2 - 1 for _ in range(2))
    if family == "detection":
        return ([torch.rand(3, 96, 128) for _ in range(BATCH)],)
    size = _image_size(name)
    return (torch.randn(BATCH, 3, size, size),)


def _targets(name: str) -> list[dict[str, Tensor]]:
    """Two objects an image; with masks or keypoints where the model learns them."""
    boxes = torch.tensor([[10.0, 10.0, 60.0, 70.0], [50.0, 20.0, 120.0, 90.0]])
    target: dict[str, Tensor] = {"boxes": boxes, "labels": torch.tensor([1, 1])}
    if name.startswith("maskrcnn"):
        target["masks"] = torch.zeros(2, 96, 128, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(target["masks"], boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
    if name.startswith("keypointrcnn"):
        spots = boxes[:, None, :2] + torch.rand(2, 17, 2) * (boxes[:, None, 2:] - boxes[:, None, :2])
        target["keypoints"] = torch.cat([spots, torch.ones(2, 17, 1)], dim=2)
    return [target] * BATCH


def _image_size(name: str) -> int:
    return next((size for start, size in IMAGE_SIZES.items() if name.startswith(start)), 64)


@torch.no_grad()
def _enliven(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("layer_scale"):
            parameter.fill_(1.0)
        elif name.endswith("weight") and parameter.dim() > 1 and not parameter.any():
            nn.init.kaiming_uniform_(parameter)


@torch.no_grad()
def _fit_norms(case: Case, passes: int = 2) -> None:
    """Set every BatchNorm's statistics to the average over a few passes in training mode."""
    norms = [module for module in case.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the average of all passes
    case.model.train()
    for _ in range(passes):
        call_model(case.model, case.training_inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
