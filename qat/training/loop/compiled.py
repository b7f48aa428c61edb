"""The model under torch.compile, as long as it trains like the model itself; otherwise the model."""

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat.preparation.proof import check_parts
from qat.text import first_line
from qat.training.run.exit_status import is_memory_shortage

LOSS_TOLERANCE, GRADIENT_FACTOR = 0.25, 4.0
"""The largest relative difference of the losses, and the largest factor between the norms of the gradients. They are
wide because compiled code draws other random numbers."""

logger = logging.getLogger("qat")


class Step(NamedTuple):
    """The result of a trial step: the loss, the norm of all gradients, and the names of parameters that have one."""

    loss: float
    norm: float
    learning: frozenset[str]


class CompiledModel:
    """Calls a model compiled in a mode of torch.compile, or the model itself if `prove` finds that they differ."""

    def __init__(self, model: nn.Module, mode: str | None) -> None:
        self._model = model
        self._compiled: Callable[[Tensor], Any] = torch.compile(model, mode=mode)
        self._proven = False

    def __call__(self, images: Tensor) -> Any:
        """Return the model's output."""
        return self._compiled(images)

    def prove(self, images: Tensor, loss_of: Callable[[Callable[[Tensor], Any]], Tensor]) -> None:
        """Before the first step, compare a compiled trial step with one of the model, without changing anything.

        A prepared model runs its self-check first, unless calibration did, because compiled code cannot run it.
        """
        if self._proven:
            return
        self._proven = True
        check_parts(self._model, {self._model: ((images,), {})})
        expected = self._step(self._model, loss_of)
        try:
            difference = _gross_difference(self._step(self._compiled, loss_of), expected)
        except Exception as error:  # an error of the compiler, since the model has just run
            if is_memory_shortage(error):
                raise
            difference = f"{type(error).__name__}: {first_line(error)}"
        if difference is not None:
            self._compiled = self._model
            logger.warning("compile: %s; training goes on without torch.compile, slower", difference)

    def _step(self, forward: Callable[[Tensor], Any], loss_of: Callable[[Callable[[Tensor], Any]], Tensor]) -> Step:
        named = dict(self._model.named_parameters())
        buffers = [(each, each.detach().clone()) for each in self._model.buffers()]
        gradients = [(each, each.grad) for each in named.values()]
        devices = {each.device.index or 0 for each in named.values() if each.is_cuda}
        with torch.random.fork_rng(devices=sorted(devices)):
            try:
                for parameter in named.values():
                    parameter.grad = None
                loss = loss_of(forward)
                loss.backward()  # type: ignore[no-untyped-call]
                found = {name: each.grad.detach() for name, each in named.items() if each.grad is not None}
                norm = math.hypot(*(float(torch.linalg.vector_norm(each.float())) for each in found.values()))
                return Step(float(loss.detach()), norm, frozenset(found))
            finally:
                with torch.no_grad():
                    for buffer, kept in buffers:
                        buffer.copy_(kept)
                for parameter, gradient in gradients:
                    parameter.grad = gradient


def _gross_difference(found: Step, expected: Step) -> str | None:
    """Describe a gross difference; None if there is none, or if the model's own loss or gradients are not finite."""
    if found.learning != expected.learning:
        name = min(found.learning ^ expected.learning)
        return f"{name} has {'a' if name in found.learning else 'no'} gradient in the compiled model only"
    if not math.isfinite(expected.loss + expected.norm):
        return None
    if not abs(found.loss - expected.loss) <= LOSS_TOLERANCE * (1 + abs(expected.loss)):
        return f"the loss of the compiled model is {found.loss:.4g} instead of {expected.loss:.4g}"
    low, high = sorted((found.norm, expected.norm)) if math.isfinite(found.norm) else (0.0, math.inf)
    if high > GRADIENT_FACTOR * low + 1e-6:
        return f"the gradients of the compiled model have the norm {found.norm:.4g} instead of {expected.norm:.4g}"
    return None
