"""Exponential moving average of a model's weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from qat.collectives import is_sharded, reshard
from qat.finetuning.oscillation import Oscillations
from qat.inputs import expect_model


class EMA:
    """Running averages of a model's floating-point parameters and buffers.

    The modules are not copied. After each step: average = decay * average + (1 - decay) * value, starting from the
    values at construction, as for the teacher of arXiv:1703.01780. At few bits weights jump between two levels until
    the end (arXiv:2203.11086), and their averages do not. An average lies between the values that it has seen, so that
    the floor of a scale applies to its average too. Integer buffers (counters, flags) and buffers with infinities
    (masks) have no average; the model's own values are used. Averaged statistics of BatchNorm are of the weights as
    they were: call `qat.reestimate_batch_norm` before an evaluation. Under torch.distributed each rank averages its
    own, without an exchange: equal parameters have equal averages.

    It costs one pass over the parameters in every step, and their memory once.

    The model is on the device of its training; decay is from 0 (no averaging) to 1 (the average never changes): 0.999
    averages about the last 1,000 steps.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> ema = EMA(model, decay=0.75)
    >>> before = model.weight.item()
    >>> with torch.no_grad():
    ...     step = model.weight.add_(1.0)  # what an optimizer does
    >>> ema.update(model)
    >>> with ema.swapped(model):  # evaluate here
    ...     print(round(model.weight.item() - before, 4))
    0.25
    >>> print(round(model.weight.item() - before, 4))
    1.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        expect_model(EMA, model, locals())
        if not 0 <= decay <= 1:
            raise ValueError(f"EMA: decay must be from 0 to 1, got {decay!r}")
        # Only the update of `AveragedModel`: the class averages integers too, and reads a counter from the device.
        self._average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._averages = {
            name: tensor.detach().clone()
            for name, tensor in _tensors(model)
            if tensor.is_floating_point() and bool(torch.isfinite(tensor).all())
        }

    def update(self, model: nn.Module) -> None:
        """Move the averages towards the model's current values."""
        pairs = list(zip(self._averages.values(), self._of(model), strict=True))
        for sharded in (False, True):  # torch does not take lists of both kinds
            kind = [pair for pair in pairs if is_sharded(pair[0]) == sharded]
            if kind:
                self._average([average for average, _ in kind], [value for _, value in kind], 0)

    def hold(self, model: nn.Module, oscillations: Oscillations) -> None:
        """Set averages of frozen weights to their integers, before an evaluation.

        They may not round to these integers yet.
        """
        with self.swapped(model):
            oscillations.hold()
            _copy(list(self._averages.values()), self._of(model))

    def copy_to(self, model: nn.Module) -> None:
        """Copy the averages into the model, in place."""
        _copy(self._of(model), list(self._averages.values()))

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Let the model hold the averages; at the end it gets its own values back."""
        tensors = [tensor.detach() for _, tensor in _tensors(model)]
        own = [tensor.clone() for tensor in tensors]
        self.copy_to(model)
        try:
            yield
        finally:
            _copy(tensors, own)
            reshard(model)  # else FSDP2 would go on with gathered averages

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name, not copied."""
        return dict(self._averages)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load averages of the same names and shapes; ValueError for others."""
        different = sorted(self._averages.keys() ^ state.keys())
        if different:
            raise ValueError(f"EMA: the averages are of another model; they differ in {different[0]!r}")
        _copy(list(self._averages.values()), [state[name] for name in self._averages])

    def _of(self, model: nn.Module) -> list[Tensor]:
        tensors = dict(_tensors(model))
        return [tensors[name].detach() for name in self._averages]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    reshard(model)  # with FSDP2, the rank's parts
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
