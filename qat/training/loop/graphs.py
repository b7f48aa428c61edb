"""Training steps and evaluations as CUDA graphs: one launch for the thousands of short kernels of a quantized model.

What a graph was recorded with stays: the shape of its batch, the memory of parameters and buffers, and every switch of
the model that Python code reads. Values written into the same memory, such as the temperature of a rule, count.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from qat.preparation.replacements import is_watched, scalar_attributes
from qat.text import first_line
from qat.training.run.exit_status import is_memory_shortage

logger = logging.getLogger("qat")

LARGEST_GAP = 1e-2
"""How far evaluation in a graph may be off, as a share of the largest value: other algorithms round otherwise."""


def switches(model: nn.Module) -> list[Any]:
    """What a graph takes for granted: modes, numbers and flags of the modules, and which parameters learn."""
    learning = [each.requires_grad for each in model.parameters()]
    return [learning, *((module.training, scalar_attributes(module)) for module in model.modules())]


class TrainingGraphs:
    """What a step calls: the model, whose forward and backward are recorded at the first call."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.layout = model, None
        self.recorded: Any = None

    def __call__(self, images: Tensor) -> Any:
        """The model's result; a batch of another shape runs operation by operation."""
        if self.recorded is None:
            self.recorded, self.layout = _Alone(self.model), _layout(images)
            # It records on a stream of its own, and torch would warn of every other stream that adds to gradients.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
            torch.cuda.make_graphed_callables(self.recorded, (images.clone(),), allow_unused_input=True)
        return (self.recorded if _layout(images) == self.layout else self.model)(images)


class _Alone(nn.Module):
    """A module around a model, since torch replaces the forward of what it records."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        return self.model(images)


class EvaluationGraph:
    """What an evaluation calls: the model under no_grad, recorded at the first batch at which no hook looks."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.layout = model, None
        self.graph: Any = None
        self.images, self.result = Tensor(), Tensor()

    def __call__(self, images: Tensor) -> Any:
        """The model's result, whose memory the next call writes again."""
        if self.layout is None and not is_watched(self.model):
            self.layout, expected = _layout(images), self.model(images)
            try:
                self._record(images, expected)
            except Exception as error:
                if is_memory_shortage(error):
                    raise
                self.graph = None
                logger.warning("cuda_graphs: %s; evaluation runs operation by operation, slower", first_line(error))
        if self.graph is None or _layout(images) != self.layout:
            return self.model(images)
        self.images.copy_(images)
        self.graph.replay()
        return self.result

    def _record(self, images: Tensor, expected: Any) -> None:
        """Record a graph that has shown that it answers this batch as the model does."""
        self.images, self.graph = images.clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.result = self.model(self.images)
        self.graph.replay()
        if not isinstance(expected, Tensor):
            raise TypeError(f"the model returns a {type(expected).__name__}, and a graph is compared by one tensor")
        off = (self.result - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        if not bool(off <= LARGEST_GAP):
            raise ValueError(f"in a graph the model answers otherwise, by {float(off):.2g} of the largest value")


def _layout(images: Tensor) -> Any:
    return images.shape, images.stride(), images.dtype
