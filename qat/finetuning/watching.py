"""A model that returns the outputs of some of its modules beside its own."""

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from qat.analysis.features import feature_extractor
from qat.preparation.prepared_graph import PreparedGraph
from qat.text import did_you_mean

LOGITS = "logits"
"""The key of the model's own output."""


def watched(model: nn.Module, names: list[str]) -> nn.Module:
    """The model itself if there are no names, else one with its modules that returns a dictionary of their outputs.

    Raises:
        ValueError: if the model has no such module.
    """
    if not names:
        return model
    if isinstance(model, PreparedGraph):  # calls the layers in a block and not the block, so that no hook on it fires
        return feature_extractor(model, {"": LOGITS, **{name: name for name in names}})
    return _Watched(model, names)


class _Watched(nn.Module):
    """Collects outputs by hooks."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        modules = dict(model.named_modules())
        for name in names:
            if name not in modules:
                hint = did_you_mean(name, modules, count=3) or f"modules are called {', '.join(list(modules)[1:4])} ..."
                raise ValueError(f"features: {type(model).__name__} has no module {name!r}; {hint}")
        self.train(model.training)

    def forward(self, *inputs: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def keep(_module: nn.Module, _inputs: Any, output: Any, name: str) -> None:
            found[name] = output

        with ExitStack() as hooks:  # for this call alone: a copy of the model would keep them
            for name in self.names:
                hooks.enter_context(self.model.get_submodule(name).register_forward_hook(partial(keep, name=name)))
            output = self.model(*inputs)
        return {LOGITS: output, **found}
