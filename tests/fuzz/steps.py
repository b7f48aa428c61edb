"""`Stepper`: one step of a model, computed in one of several ways, and all its results."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qat.codes.operators import geometry
from tests.fuzz.agreement import Results, noise
from tests.fuzz.program import CONTEXTS, namespace

Context = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def integers_however_small() -> Iterator[None]:
    """Multiply in integers wherever that is exact, even where the product is too small to be faster."""
    limits = [name for name in vars(geometry) if name.startswith(("FEWEST_", "SMALLEST_"))]
    with mock.patch.multiple(geometry, **dict.fromkeys(limits, 1)):
        yield


def fast(context: str) -> Context:
    """How training on codes runs; context: one of `CONTEXTS`."""
    space = {**namespace(), "integers_however_small": integers_however_small}
    return lambda: eval(CONTEXTS[context], space)


@dataclass
class Stepper:
    """Runs steps of a model, each from its initial state.

    Attributes:
        model: restored after every step.
        draw: makes the inputs of an attempt; of the first, gradients are results too.
        seen: values that hooks record.
    """

    model: nn.Module
    draw: Callable[[int], tuple[Tensor, ...]]
    seen: list[float]

    def __post_init__(self) -> None:
        self.state = [(t, t.detach().clone()) for t in (*self.model.parameters(), *self.model.buffers())]

    def step(self, attempt: int, context: Context, backward: bool = True, seed: int | None = None) -> Results:
        """Outputs, gradients, buffers and what hooks saw; with a seed, under noise."""
        self.seen.clear()
        x, *others = self.draw(attempt)
        torch.manual_seed(attempt)  # for dropouts
        # Other data gets other noise: under the same noise, an element near a tie always falls to the same side.
        noisy = contextlib.nullcontext() if seed is None else noise(self.model, 1000 * attempt + seed)
        try:
            with context(), noisy, torch.set_grad_enabled(backward):
                outputs = [y for y in pytree.tree_leaves(self.model(x, *others)) if isinstance(y, Tensor)]
                results = {f"output {number}": y.detach().clone() for number, y in enumerate(outputs)}
                if backward:
                    self._backward(outputs)
            results |= {f"buffer {name}": b.detach().clone() for name, b in self.model.named_buffers()}
            gradients = (*self.model.named_parameters(), ("input", x))
            results |= {f"gradient of {name}": p.grad for name, p in gradients if p.grad is not None}
            if self.seen:
                results["seen by hooks"] = torch.tensor(self.seen)
            return results
        finally:
            self._restore()

    def _backward(self, outputs: list[Tensor]) -> None:
        """Backward of the weighted sum of all outputs, with a random weight for each element."""
        total = torch.zeros((), requires_grad=True) * 1
        for y in outputs:
            weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(y.numel()))
            total = total + (y * weights).sum()
        total.backward()

    def _restore(self) -> None:
        with torch.no_grad():
            for tensor, before in self.state:
                tensor.copy_(before)
                tensor.grad = None


@contextlib.contextmanager
def even_dropouts() -> Iterator[None]:
    """Dropout scales but drops nothing: which elements it drops depends on the memory layout."""

    def even(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training:
            return x  # itself, as torch returns it: a write into the result is one into x
        return x.div_(1 - p) if inplace else x / (1 - p)

    with mock.patch.object(F, "dropout", even):
        yield
