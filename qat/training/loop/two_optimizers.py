"""`TwoOptimizers`: one for the weights and one for the scales, behind the interface of one."""

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer


class TwoOptimizers(Optimizer):
    """Optimizers of different parameters that step together, for a schedule, a gradient scaler and a checkpoint.

    The groups are those of the parts, the same dictionaries: a rate that is set here is set there. Under amp=fp16 each
    step waits for the device, since the scaler has to know by then whether the gradients are finite.

    >>> import torch
    >>> weight, scale = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    >>> both = TwoOptimizers([torch.optim.SGD([weight], lr=0.1), torch.optim.Adam([scale], lr=1e-3)])
    >>> (weight + 5 * scale).backward()
    >>> both.step()
    >>> round(weight.item(), 4), round(scale.item(), 4)
    (0.9, 0.999)
    """

    def __init__(self, parts: Iterable[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__(self._groups(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step with each."""
        if closure is not None:
            raise TypeError("TwoOptimizers.step: takes no closure, since two optimizers would call it twice")
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of the parts, in their order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = self._groups()  # a part that loads has new dictionaries

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]
