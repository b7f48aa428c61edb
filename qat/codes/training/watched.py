"""Modules that kernels may replace, and guards that detect when a model changed.

A kernel computes what a module would, without calling it. That is correct only for classes whose forward is known, if
no hook waits for the call, if nothing changed what the call computes (a patched `forward`, a subclass), and as long as
the module still has the attributes that the graph was derived from.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from qat.graph.guards import Snapshot
from qat.graph.operations import TABLE
from qat.layers import QuantConv1d, QuantConv2d, QuantConv3d, QuantFunction, QuantLayer, QuantLinear
from qat.preparation.replacements import METHODS, ModuleSnapshot, is_watched, watch
from qat.quantizer import LSQQuantizer, Quantizer

LAYERS = (QuantConv1d, QuantConv2d, QuantConv3d, QuantLinear, QuantFunction)

READ: dict[type[nn.Module], tuple[str, ...]] = {
    LSQQuantizer: ("training", "observer", "is_calibrated", "is_disabled", "spec", "role"),
    **dict.fromkeys(LAYERS, ("training", "input_quantizer")),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), ("training", "track_running_stats")),
    **{module: row.reads for row in TABLE if row.reads is not None for module in row.modules},
}
"""Classes that kernels may replace, and attributes that a graph is derived from."""

NOT_GUARDED = {"observer", "is_calibrated", "spec", "role", "input_quantizer"}
"""Attributes that torch.compile cannot watch."""


def _methods(kind: type[nn.Module]) -> tuple[object, ...]:
    return tuple(getattr(kind, name, None) for name in METHODS)


_ORIGINALS = {kind: _methods(kind) for kind in READ}


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without parametrisations."""
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return kind


def known_kind(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the class in `READ`: the class itself, or the base class of a quantizer."""
    if kind in READ or not issubclass(kind, Quantizer):
        return kind if kind in READ else None
    return next((base for base in kind.__mro__ if base in READ), None)


def is_changed(kind: type[nn.Module]) -> bool:
    """Return True if a class overrides a method of `METHODS`, or was patched."""
    known = known_kind(kind)
    return known is None or _methods(kind) != _ORIGINALS[known]


def module_refusal(module: nn.Module) -> str | None:
    """Return why no kernel may replace a call of this module, or None if one may."""
    kind = kind_of(module)
    if known_kind(kind) is None:
        return f"kernels do not compute what {kind.__name__} does"
    if is_changed(kind):
        return f"a method of {kind.__name__} that kernels stand in for was replaced"
    if is_watched(module):
        return "a hook waits for its call, or its forward was replaced"
    reason = module_refusal(module.weight_quantizer) if isinstance(module, QuantLayer) else None
    return reason if reason is None else f"its weight_quantizer: {reason}"


def _facts(module: nn.Module) -> Callable[[], object]:
    names = READ.get(known_kind(kind_of(module)) or nn.Module)
    return partial(attrgetter(*names), module) if names else lambda: None


class Watched(Snapshot):
    """The modules of a fused graph: their classes, attributes and hooks at that time."""

    def __init__(self, model: nn.Module, names: set[str]) -> None:
        modules = {name: model.get_submodule(name) for name in sorted(names)}
        facts = {name: _facts(module) for name, module in modules.items()}
        known = {kind for kind in map(kind_of, modules.values()) if known_kind(kind) is not None}
        states = [
            (name, (type(m).__qualname__, _described(facts[name]()), is_watched(m))) for name, m in modules.items()
        ]
        self.text = repr((states, sorted(kind.__qualname__ for kind in known if is_changed(kind))))
        reads: list[Callable[[], object]] = [*ModuleSnapshot(model, names).reads, *facts.values()]
        reads += [partial(type, m) for m in modules.values()]
        reads += [read for m in modules.values() for read in watch(m)]
        super().__init__([*reads, *(partial(is_changed, kind) for kind in known)])
        self._guards = [
            (name, key, getattr(m, key))
            for name, m in modules.items()
            if known_kind(type(m)) is not None
            for key in ("__class__", *sorted({*READ[known_kind(type(m)) or type(m)]} - NOT_GUARDED))
        ]

    def holds_compiled(self, model: nn.Module) -> bool:
        """Return True if nothing changed that torch.compile can watch; it guards on that."""
        return all(getattr(model.get_submodule(name), key) == value for name, key, value in self._guards)


def _described(found: object) -> str:
    # Without the addresses of modules and tensors, which differ from run to run.
    values = found if isinstance(found, tuple) else (found,)
    return repr([type(value).__name__ if isinstance(value, (nn.Module, torch.Tensor)) else value for value in values])


class _Block:
    # Its attributes are the modules that a graph names; anything else is read from the model's block.
    def __init__(self, block: nn.Module) -> None:
        self.__block = block

    def __getattr__(self, name: str) -> object:
        return getattr(self.__block, name)


def module_tree(model: nn.Module, graph: fx.Graph) -> object:
    """Return an object that answers a graph's lookups as the model does, but faster.

    A module looks up each child in a Python function: 1.5 ms a step for MobileNetV2.
    """
    tree = _Block(model)  # the first level, whose blocks are made as paths need them
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    for path in sorted(paths & modules.keys(), key=lambda path: path.count(".")):
        place: object = tree
        steps = path.split(".")
        for depth, step in enumerate(steps[:-1], start=1):
            if isinstance(place, nn.Module):  # the graph names it too, and it finds its children itself
                break
            place = vars(place).setdefault(step, _Block(modules[".".join(steps[:depth])]))
        if not isinstance(place, nn.Module):
            vars(place)[steps[-1]] = modules[path]
    return tree
