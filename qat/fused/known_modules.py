"""Decides which modules kernels may replace, and remembers the state that a graph on codes was derived from.

A kernel computes what a module would, without calling it. That is correct only for classes whose forward is known, if
no hook waits for the call, if nothing changed what the call computes (a patched `forward`, a subclass), and as long as
the module still has the attributes that the graph was derived from.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from qat.fused import activation_table
from qat.layers import QuantConv1d, QuantConv2d, QuantConv3d, QuantFunction, QuantLayer, QuantLinear
from qat.preparation.hooks import METHODS, is_watched, watch
from qat.preparation.replacements import ModuleSnapshot
from qat.quantizer import LSQQuantizer, Quantizer

LAYERS = (QuantConv1d, QuantConv2d, QuantConv3d, QuantLinear, QuantFunction)

READ: dict[type[nn.Module], tuple[str, ...]] = {
    LSQQuantizer: ("training", "observer", "is_calibrated", "is_disabled", "spec", "role"),
    **dict.fromkeys(LAYERS, ("training", "input_quantizer")),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), ("training", "track_running_stats")),
    **activation_table.READ,
    nn.Softmax: ("dim",),
    nn.MaxPool2d: ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout), ("inplace",)),
    **dict.fromkeys((nn.Flatten, nn.Unflatten, nn.Identity, nn.ChannelShuffle, nn.PixelShuffle, nn.PixelUnshuffle), ()),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool3d), ("return_indices",)),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), ("return_indices",)),
}
"""The classes that kernels may replace, and the attributes that a graph is derived from; their other attributes are
read in every step."""


def _methods(kind: type[nn.Module]) -> tuple[Any, ...]:
    return tuple(getattr(kind, name, None) for name in METHODS)


_ORIGINALS = {kind: _methods(kind) for kind in READ}


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module, without parametrisations."""
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return kind


def known_kind(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class in `READ`: the class itself, or the base class of a quantizer; None if there is none."""
    if kind in READ or not issubclass(kind, Quantizer):
        return kind if kind in READ else None
    return next((base for base in kind.__mro__ if base in READ), None)


def is_changed(kind: type[nn.Module]) -> bool:
    """Whether a class computes something other than its known kind did when qat was imported.

    It was patched, or it overrides a method that decides what a call computes.
    """
    known = known_kind(kind)
    return known is None or _methods(kind) != _ORIGINALS[known]


def module_refusal(module: nn.Module) -> str | None:
    """Why no kernel may replace a call of this module; None if one may."""
    kind = kind_of(module)
    if known_kind(kind) is None:
        return f"kernels do not compute what {kind.__name__} does"
    if is_changed(kind):
        return f"a method of {kind.__name__} that kernels stand in for was replaced"
    if is_watched(module):
        return "a hook waits for its call, or its forward was replaced"
    reason = module_refusal(module.weight_quantizer) if isinstance(module, QuantLayer) else None
    return reason if reason is None else f"its weight_quantizer: {reason}"


def may_stand_in(module: nn.Module | None) -> bool:
    """Whether a kernel may replace a call of this module."""
    return module is not None and module_refusal(module) is None


_READERS: dict[type[nn.Module] | None, Callable[[Any], Any]] = {
    kind: attrgetter(*names) if names else (lambda module: None) for kind, names in READ.items()
}


NUMBERS = frozenset(name for names in READ.values() for name in names) - {
    "observer", "is_calibrated", "spec", "role", "input_quantizer"
}  # fmt: skip
"""Attributes that torch.compile can watch."""


def numbers_of(
    model: nn.Module, names: set[str]
) -> tuple[tuple[str, type[nn.Module], tuple[tuple[str, Any], ...]], ...]:
    """Names, classes and `NUMBERS` of the modules that kernels may replace: what compiled code has to compare."""
    found = []
    for name in sorted(names):
        module = model.get_submodule(name)
        known = known_kind(type(module))
        if known is not None:
            wanted = NUMBERS.intersection(READ[known])
            found.append((name, type(module), tuple((key, getattr(module, key)) for key in sorted(wanted))))
    return tuple(found)


class ModuleState:
    """The state of modules that a fused graph was derived from: a `ModuleSnapshot`, and what kernels take for granted.

    Args:
        model: a prepared model.
        names: of the modules that the graph calls or replaces.

    Attributes:
        text: the state as text; a copy of the model has the same.
    """

    def __init__(self, model: nn.Module, names: set[str]) -> None:
        modules = {name: model.get_submodule(name) for name in sorted(names)}
        facts = {
            name: partial(_READERS.get(known_kind(kind_of(each)), _nothing), each) for name, each in modules.items()
        }
        kinds = {kind_of(each) for each in modules.values()}
        known = sorted((kind for kind in kinds if known_kind(kind) is not None), key=lambda kind: kind.__qualname__)
        words = [
            (name, (type(each).__qualname__, _in_words(facts[name]()), is_watched(each)))
            for name, each in modules.items()
        ]
        self.text = repr((words, [kind.__qualname__ for kind in known if is_changed(kind)]))
        self._reads: list[Callable[[], Any]] = [*ModuleSnapshot(model, names).reads, *facts.values()]
        self._reads += [partial(type, each) for each in modules.values()]
        self._reads += [read for each in modules.values() for read in watch(each)]
        self._reads += [partial(is_changed, kind) for kind in known]
        self._values = [read() for read in self._reads]

    def holds(self) -> bool:
        """Whether nothing changed: modules, classes, attributes, hooks."""
        return [read() for read in self._reads] == self._values


def _nothing(module: nn.Module) -> None:
    """The reader for modules that the graph calls: it depends on none of their attributes."""


def _in_words(found: Any) -> str:
    """Attributes as text, without the addresses of modules and tensors."""
    values = found if isinstance(found, tuple) else (found,)
    return repr([type(value).__name__ if isinstance(value, (nn.Module, torch.Tensor)) else value for value in values])
