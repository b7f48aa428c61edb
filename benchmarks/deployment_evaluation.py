"""Evaluation in torch: a prepared model and `qat.convert` of it against the float model."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import qat
from benchmarks.deployment_models import float_model, prepared_model, random_images, size_of
from benchmarks.speed_rows import Row, timing_rows
from benchmarks.speed_timing import Call, Limits, contest
from qat.kernels import plain_formulas

MODELS = (
    "resnet18",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "shufflenet_v2_x1_0",
    "regnet_y_400mf",
    "vit_b_16",
)
BATCHES = (1, 16)
PLAIN = ("resnet18",)
"""Whose evaluation operation by operation is measured too."""


def rows(given: Any) -> Iterator[list[Row]]:
    """A comparison for each model and batch."""
    for name in given.models or MODELS:
        images = random_images(name)
        model = float_model(name, images)
        prepared = prepared_model(model, images)
        with torch.no_grad():
            for batch in given.batch or BATCHES:
                limits = Limits(given.rounds, given.seconds, repeats=3 if batch == 1 else 1)
                about = {"subject": name, "batch": batch, "size": size_of(name)}
                makers = _variants(name, model, prepared, images[:batch])
                yield timing_rows("evaluation", about, "float", contest(makers, "float", limits))


def _variants(name: str, model: nn.Module, prepared: nn.Module, images: Tensor) -> dict[str, Any]:
    """Float in the layout that oneDNN likes best, and as torch makes models; then ours."""
    last = torch.channels_last
    variants = {
        "float": lambda: _call(model.to(memory_format=last), images.contiguous(memory_format=last)),
        "float_contiguous": lambda: _call(_copied(model), images.contiguous()),
        "eval": lambda: _call(prepared, images),
        "convert": lambda: _call(qat.convert(prepared), images),
    }
    if name in PLAIN:
        variants["plain"] = lambda: _plainly(_call(prepared, images))
    return variants


def _copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(memory_format=torch.contiguous_format)


def _call(model: nn.Module, images: Tensor) -> Call:
    return lambda: model(images)


def _plainly(call: Call) -> Call:
    def run() -> Any:
        with plain_formulas():
            return call()

    return run
