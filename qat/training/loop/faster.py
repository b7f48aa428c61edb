"""A faster way through the model, as long as it trains like the model itself; otherwise the model."""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qat.preparation.proof import check_parts
from qat.text import first_line
from qat.training.loop.graphs import TrainingGraphs
from qat.training.loop.stage import StageRun
from qat.training.loop.trial import Step, trial_step
from qat.training.run.exit_status import is_memory_shortage

LOSS_TOLERANCE, GRADIENT_FACTOR = 0.25, 4.0
"""The largest relative difference of the losses, and the largest factor between the norms of the gradients. They are
wide because compiled code draws other random numbers."""

logger = logging.getLogger("qat")


def faster_way(
    run: StageRun,
    forward: nn.Module,
    images: Tensor,
    loss_of: Callable[[Callable[[Tensor], Any]], Tensor],
) -> Callable[[Tensor], Any]:
    """`forward`, which calls the run's model, compiled or in CUDA graphs as the config and the device have it."""
    if run.config.compile:
        check_parts(run.model, {run.model: ((images,), {})})
        return as_tried("compile", torch.compile(forward), run.model, forward, loss_of)
    if run.in_graphs:
        return as_tried("cuda_graphs", TrainingGraphs(forward), run.model, forward, loss_of)
    return forward


def as_tried(
    setting: str,
    fast: Callable[[Tensor], Any],
    model: nn.Module,
    forward: Callable[[Tensor], Any],
    loss_of: Callable[[Callable[[Tensor], Any]], Tensor],
) -> Callable[[Tensor], Any]:
    """`fast`, which `setting` asks for; `forward`, the slower way, if a trial step finds a difference."""
    expected = trial_step(model, forward, loss_of)
    try:
        difference = _gross_difference(trial_step(model, fast, loss_of), expected)
    except Exception as error:  # of the compiler or the recording, since the model has just run
        if is_memory_shortage(error):
            raise
        difference = f"{type(error).__name__}: {first_line(error)}"
    if difference is None:
        return fast
    logger.warning("%s: %s; training goes on without, slower", setting, difference)
    return forward


def _gross_difference(found: Step, expected: Step) -> str | None:
    """Describe a gross difference; None if there is none, or if the model's own loss or gradients are not finite."""
    if found.learning != expected.learning:
        name = min(found.learning ^ expected.learning)
        return f"{name} has {'a' if name in found.learning else 'no'} gradient in the faster model only"
    if not math.isfinite(expected.loss + expected.norm):
        return None
    if not abs(found.loss - expected.loss) <= LOSS_TOLERANCE * (1 + abs(expected.loss)):
        return f"the loss of the faster model is {found.loss:.4g} instead of {expected.loss:.4g}"
    low, high = sorted((found.norm, expected.norm)) if math.isfinite(found.norm) else (0.0, math.inf)
    if high > GRADIENT_FACTOR * low + 1e-6:
        return f"the gradients of the faster model have the norm {found.norm:.4g} instead of {expected.norm:.4g}"
    return None
