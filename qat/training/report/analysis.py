"""Analysis of the trained model for the report, beside its curves."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat.analysis.cost import cost
from qat.analysis.errors import layer_errors
from qat.analysis.table import quantizers_in_order
from qat.batch_norm import batch_norms, copied_statistics, reestimate_batch_norm, restore_statistics
from qat.contexts import evaluating
from qat.export.onnxruntime.session import open_session, run_session
from qat.integers.evaluation import evaluation_copy
from qat.quantizer import Quantizer
from qat.training.data.loaders import Data
from qat.training.loop.evaluation import to_device
from qat.training.report.drawing import draw_answers
from qat.training.run.folder import DRAWN, MODEL, Json
from qat.training.tasks.task import Task

IMAGES = 16  # for the errors of layers
ANSWERS = 5000  # at most, validation images whose answers are compared with the float model's
COSTS = ("name", "weight_bits", "activation_bits")


def analyse(
    model: nn.Module,
    float_model: nn.Module,
    data: Data,
    device: torch.device,
    task: Task,
    folder: Path,
    written: bool,
) -> Json:
    """Return the content of analysis.json, and draw answers, the file's if it is `written`.

    Models keep their modes and statistics.
    """
    images = to_device(next(iter(data.calibration(1))), device, channels_last=False)[0][:IMAGES]
    inferred, example = evaluation_copy(model), images[:1].cpu()  # without auxiliary classifiers
    errors = layer_errors(inferred, images.cpu())
    drawn: Json = {}
    if task.kind != "labels":
        engines: dict[str, Any] = {"float": lambda x: float_model(x.to(device)), "QAT": lambda x: model(x.to(device))}
        if written:
            engines[MODEL] = partial(run_session, open_session(folder / MODEL))
        with evaluating(model), evaluating(float_model):
            drawn = draw_answers(folder / DRAWN, engines, data, task)
    return {
        "order": quantizers_in_order(model),
        "layers": [vars(each) for each in errors],
        "cost": [{key: getattr(row, key) for key in COSTS} for row in cost(inferred, example)],
        "bits": {name: each.spec.bits for name, each in model.named_modules() if isinstance(each, Quantizer)},
        "batch_norm": batch_norm_lag(model, data, device),
        "answers": compare_answers(model, float_model, data, device, task),
        "pictures": drawn,
    }


def batch_norm_lag(model: nn.Module, data: Data, device: torch.device) -> dict[str, float]:
    """Return the distance of running statistics from those of eight training batches.

    It is the mean over channels of |running mean - mean| / deviation, or of |log2(running variance / variance)|,
    whichever is larger, for each BatchNorm: 0 if evaluation normalises as training did.
    """
    norms = {name: each for name, each in model.named_modules() if each in batch_norms(model)}
    kept = copied_statistics(model)
    running = {name: (norm.running_mean.clone(), norm.running_var.clone()) for name, norm in norms.items()}
    batches = (batch for batch, _ in zip(data.train, range(8), strict=False))
    images = (to_device(batch, device, channels_last=False)[0] for batch in batches)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if not norms or not len(data.train) or not reestimate_batch_norm(model, images):
            return {}
    lag = {}
    for name, (mean, variance) in running.items():
        norm, deviation = norms[name], (norms[name].running_var + norms[name].eps).sqrt()
        off = ((mean - norm.running_mean).abs() / deviation).mean()
        wider = ((variance + norm.eps) / (norm.running_var + norm.eps)).log2().abs().mean()
        lag[name] = float(torch.maximum(off, wider))
    restore_statistics(model, kept)
    return lag


@torch.no_grad()
def compare_answers(model: nn.Module, float_model: nn.Module, data: Data, device: torch.device, task: Task) -> Json:
    """Count changed answers: rows of truth, answer before, answer now, images."""
    if task.kind == "boxes":  # no answer has one truth
        return {}
    changes: Counter[tuple[int, int, int]] = Counter()
    images_seen = count = 0
    with evaluating(model), evaluating(float_model):
        for batch in data.val:
            images, labels = to_device(batch, device, channels_last=False)
            pair = [task.classes(task.answers(each(images), images)) for each in (float_model, model)]
            rows = torch.stack((labels, *pair)).flatten(1)
            changed = (rows[1] != rows[2]) & (rows[0] < len(data.classes))
            rows, numbers = torch.unique(rows[:, changed], dim=1, return_counts=True)
            changes.update(dict(zip(map(tuple, rows.T.tolist()), numbers.tolist(), strict=True)))
            count, images_seen = count + labels.numel(), images_seen + len(labels)
            if images_seen >= ANSWERS:
                break
    table = [[*classes, number] for classes, number in changes.most_common()]
    return {"answers": count, "classes": data.classes, "changes": table}
