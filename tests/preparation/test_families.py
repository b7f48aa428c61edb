"""One small model of each torchvision family: prepared, calibrated, trained for a step, compared, measured."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import qat
from benchmarks.work import integer_work
from benchmarks.zoo_models import Case, build
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from qat.quantizer import Quantizer
from tests.references.prepared_case import activation_quantizers, assert_takes_float_state, without_quantizers

QUICK = ("mobilenet_v3_small", "shufflenet_v2_x0_5")
SLOW = (
    "convnext_tiny", "densenet121", "efficientnet_b0", "mnasnet0_5", "mobilenet_v2", "regnet_y_400mf", "resnet18",
    "googlenet", "squeezenet1_1", "swin_t", "lraspp_mobilenet_v3_large",
    "vit_b_32", "ssdlite320_mobilenet_v3_large",
    "alexnet", "inception_v3", "maxvit_t", "resnext50_32x4d", "swin_v2_t", "vgg11_bn", "deeplabv3_mobilenet_v3_large",
    "fcn_resnet50", "fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn",
    "maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn", "ssd300_vgg16", "r3d_18", "mc3_18", "r2plus1d_18", "s3d",
    "swin3d_t", "mvit_v1_b", "raft_small", "raft_large",
)  # fmt: skip

FINE = qat.QuantRecipe(weight=qat.QuantSpec(bits=16), activation=qat.QuantSpec(bits=16, init="minmax"))
"""Grids so fine that rounding does not show in the outputs: random deep networks amplify that of 8 bits."""

DETECTION = ("ssd", "rcnn", "retinanet", "fcos")
"""Their outputs are sorted and filtered by scores, so that comparing them is meaningless."""


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_family_trains_and_evaluates_on_integers(name: str) -> None:
    """A slow one alone proves the wiring of its own family; googlenet's heads in training: `by_mode`."""
    case = build(name)
    if hasattr(case.model, "roi_heads"):
        case.model.roi_heads.score_thresh = 0.0  # without detections the mask head would have no input
    learning = set(gradients(copy.deepcopy(case.model), case))
    model = qat.prepare(case.model, FINE, example_inputs=case.inputs)
    assert_takes_float_state(model, case.model.state_dict())

    calibrate(model, case)
    assert all(model.get_submodule(quantizer).is_calibrated for quantizer in activation_quantizers(model))
    if not any(kind in name for kind in DETECTION):
        expected = outputs(case.model, case)
        for a, b in zip(outputs(without_quantizers(model), case), expected, strict=True):
            assert float((a - b).square().mean().sqrt()) < 1e-3 * float(b.square().mean().sqrt())
        assert min(correlation(a, b) for a, b in zip(outputs(model, case), expected, strict=True)) > 0.99

    work = integer_work(model, case.inputs)
    assert work.share >= 0.99, (work.share, work.in_float, notes_of(model, LEFT_IN_FLOAT))

    found_gradients = gradients(model, case)
    learned = {
        f"{n}.{p}" for n, m in model.named_modules() if isinstance(m, Quantizer) for p, _ in m.named_parameters()
    }
    without = (learning | learned) - set(found_gradients)
    assert not without, f"without a gradient: {sorted(without)[:5]}"
    for parameter, gradient in found_gradients.items():
        assert bool(gradient.isfinite().all()), parameter


def gradients(model: nn.Module, case: Case) -> dict[str, Tensor]:
    torch.manual_seed(1)
    result = model.train()(
        *copy.deepcopy(case.inputs), *(() if case.targets is None else (copy.deepcopy(case.targets),))
    )
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    sum(leaf.square().mean() for leaf in leaves).backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


@torch.no_grad()
def outputs(model: nn.Module, case: Case) -> list[Tensor]:
    torch.manual_seed(1)
    return tree_leaves(model.eval()(*copy.deepcopy(case.inputs)))


def calibrate(model: nn.Module, case: Case) -> None:
    only = case.inputs[0]
    if len(case.inputs) == 1:
        qat.calibrate(model, [only if isinstance(only, Tensor) else (only,)])
    else:
        qat.calibrate(model, [dict(zip(("image1", "image2"), case.inputs, strict=True))])


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])
