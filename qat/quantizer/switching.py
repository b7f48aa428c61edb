"""Two switches of a quantizer: off, so that its tensor passes in float, and frozen, so that its range stays."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from qat.torch_internals import FORWARD_HOOKS, hooks_of

SWITCHES = DISABLED, FROZEN = "disabled", "frozen"
"""Keys of a quantizer in the state dict, there only while the switch is set: a model without them has the same keys as
ever, and older checkpoints load."""


class Switchable(nn.Module):
    """Base of `Quantizer`: remembers both switches, and saves and loads them with the state.

    Attributes:
        is_disabled: the tensor passes as it is, in training and evaluation.
        is_frozen: learned parameters get no gradient, and observed ranges do not follow the data.
    """

    is_disabled: bool = False  # for pickles of older versions, which have neither
    is_frozen: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.is_disabled = self.is_frozen = False  # on the module itself, where torch.compile watches them

    def freeze(self, frozen: bool = True) -> None:
        """Keep the range as it is; with False, let it learn or follow the data again."""
        self.is_frozen = frozen
        for parameter in self.parameters():
            parameter.requires_grad_(not frozen)
            parameter.grad = None  # else an optimizer would apply the last one again

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without the hooks that an aid has put up for a time, since it would not end there."""
        hooks = {key: hook for key, hook in hooks_of(self)[0].items() if not getattr(hook, "for_a_time", False)}
        return {**self.__dict__, FORWARD_HOOKS: OrderedDict(hooks)}

    def switches(self) -> list[str]:
        """The switches that are set, in words."""
        return [word for word, isset in (("switched off", self.is_disabled), ("frozen", self.is_frozen)) if isset]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, isset in ((DISABLED, self.is_disabled), (FROZEN, self.is_frozen)):
            if isset:
                destination[f"{prefix}{key}"] = torch.tensor(True)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        found = [state_dict.pop(f"{prefix}{key}", None) is not None for key in (DISABLED, FROZEN)]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if f"{prefix}calibrated" not in state_dict:  # a float model's state says nothing about this quantizer
            return
        self.is_disabled = found[0]
        if found[1] != self.is_frozen:
            self.freeze(found[1])
