"""Changes after preparation: replaced modules, hooks, patched methods.

A quantized layer's call passes it the quantizer of its input and its BatchNorm. Any other module, a new head or an
adapter, is called as in the float model, and a BatchNorm that it does not take runs on its own.
"""

import logging
from collections.abc import Callable
from functools import partial

from torch import fx, nn

from qat.graph.guards import Snapshot
from qat.graph.nodes import submodule_of
from qat.layers import QuantLayer
from qat.preparation.operations import grid_of
from qat.preparation.swapping import folds
from qat.quantizer import Quantizer
from qat.quantizer.base import CALL_METHODS
from qat.torch_internals import children_of, hooks_of

MODULE_ARGUMENTS = ("input_quantizer", "norm")
"""Keyword arguments that preparation adds to a layer's call, modules of the model."""

AS_PREPARED = "qat_as_prepared"
"""Key of node.meta: the call's module arguments when prepared, keyword to path."""

STANDALONE_NORM = "qat_standalone_norm"
"""Key of node.meta: the call of a norm that its layer took as an argument before."""

SPLIT = "qat_split"
"""Key of node.meta: the path of a split activation, which is not called any more."""

METHODS = (
    "compute", "operate", "quantized", "_conv_forward", "channels_first", "torch_layout", "_check_input_dim",
    *CALL_METHODS,
)  # fmt: skip
"""Methods that run when a module of a known class is called, and could be patched."""

_NAMES = frozenset(METHODS)

log = logging.getLogger("qat")


def is_watched(module: nn.Module) -> bool:
    """Return True if the module has hooks, or a method patched on the instance."""
    return any(hooks_of(module)) or not _NAMES.isdisjoint(vars(module))


def watch(module: nn.Module) -> list[Callable[[], object]]:
    """Return calls whose results change if the answer of `is_watched` does."""
    return [*(hooks.__len__ for hooks in hooks_of(module)), partial(_NAMES.isdisjoint, vars(module))]


def may_write(module: nn.Module | None) -> bool:
    """Return True if a module may write into its inputs."""
    if module is None:
        return False
    # torch's own write only with `inplace`, which the graph shows.
    known = isinstance(module, (QuantLayer, Quantizer)) or type(module).__module__.startswith("torch.nn.modules.")
    return not known or is_watched(module)


def scalar_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """Return the attributes that are numbers, strings, flags, or tuples of such."""
    plain = (int, float, str, bool, type(None))
    return [
        (key, value)
        for key, value in vars(module).items()
        if all(isinstance(each, plain) for each in (value if isinstance(value, tuple) else (value,)))
        and key not in ("training", "shape_env") and not key.startswith("_")
    ]  # fmt: skip


class ModuleSnapshot(Snapshot):
    """The modules that a model's graph calls or passes on, and the blocks around them."""

    def __init__(self, model: nn.Module, names: set[str]) -> None:
        steps = {name.rsplit(".", up)[0] for name in names for up in range(name.count(".") + 1)}
        blocks = {name: model.get_submodule(name) for name in sorted(steps - names)}
        self._scalars = [
            (name, vars(block), *found) for name, block in [("", model), *blocks.items()]
            for found in scalar_attributes(block)
        ]  # fmt: skip
        # The blocks whose hooks never fire, since a graph does not call blocks.
        self.silent = {name for name, block in blocks.items() if is_watched(block)}
        parents = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in sorted(steps)]
        reads = [partial(children_of(parent).get, name) for parent, name in parents]
        reads += [partial(attributes.get, key) for _, attributes, key, _ in self._scalars]
        super().__init__([*reads, *(read for block in blocks.values() for read in watch(block))])

    def warn_of_attributes(self) -> None:
        """Log changed attributes of the model and its blocks: a graph does not read them."""
        for name, attributes, key, value in self._scalars:
            if attributes.get(key) != value:
                log.warning(
                    "%r changed, and what forward computed from it is fixed since the model was prepared; prepare it"
                    " again if it reads that", f"{name}.{key}".lstrip("."),
                )  # fmt: skip

    def warn_of_hooks(self, known: set[str]) -> None:
        """Log which blocks have hooks that never fire, except for known ones."""
        for name in sorted(self.silent - known):
            log.warning(
                "a hook or a patched forward of %r never runs, for a prepared model calls the layers in it and not"
                " itself; take its features with qat.feature_extractor(model, [%r])", name, name,
            )  # fmt: skip


def module_names(model: fx.GraphModule) -> set[str]:
    """Return the modules that a graph calls or passes on, and weight quantizers."""
    names = {
        str(node.target)
        for node in model.graph.nodes
        if node.op == "call_module" or (node.op == "get_attr" and _module_at(model, str(node.target)) is not None)
    }
    split = {node.meta[SPLIT] for node in model.graph.nodes if SPLIT in node.meta}
    names |= {path for path in split if _module_at(model, path) is not None}
    layers = {name for name in names if isinstance(model.get_submodule(name), QuantLayer)}
    return names | {f"{name}.weight_quantizer" for name in layers}


def follow_replacements(model: fx.GraphModule) -> bool:
    """Make every call fit its module; return True if one changed: then recompile."""
    changed = False
    for node in list(model.graph.nodes):
        path = node.meta.get(SPLIT, str(node.target))
        found = _module_at(model, path)
        other = SPLIT in node.meta and found is not None and type(found) is not nn.SiLU
        if other or (node.op == "call_module" and found is None):
            raise ValueError(
                f"{path!r} is called by the prepared model, and is gone; replace layers one by one, or prepare"
                " the changed model again"
            )
        now = {
            key: value for key, value in node.kwargs.items() if key in MODULE_ARGUMENTS and isinstance(value, fx.Node)
        }
        paths = node.meta.get(AS_PREPARED, {key: str(value.target) for key, value in now.items()})
        if node.op != "call_module" or not paths:
            continue
        wanted = {key: path for key, path in paths.items() if _takes(node, key, path, model)}
        if wanted.keys() == now.keys():
            continue
        changed = True
        node.meta[AS_PREPARED] = paths  # a quantized layer may come back
        _pass_modules(node, wanted, now)
        _call_norm_alone(node, None if "norm" in wanted else paths.get("norm"))
    if changed:
        for node in reversed(list(model.graph.nodes)):
            if node.op == "get_attr" and not node.users:
                model.graph.erase_node(node)
        model.graph.lint()
    return changed


def _takes(node: fx.Node, key: str, path: str, model: fx.GraphModule) -> bool:
    module, handed = submodule_of(model, node), _module_at(model, path)
    if not isinstance(module, QuantLayer):
        return False
    if key == "norm":
        return folds(module, handed, node) and getattr(handed, "running_var", None) is not None
    if key == "input_quantizer" and isinstance(node.args[0], fx.Node):
        # What stands between them may be another module now, which does not keep the grid: a dropout became a clip.
        source = grid_of(node.args[0], model)
        return source is not None and submodule_of(model, source) is handed
    return isinstance(handed, Quantizer)


def _pass_modules(node: fx.Node, wanted: dict[str, str], now: dict[str, fx.Node]) -> None:
    others = {key: value for key, value in node.kwargs.items() if key not in MODULE_ARGUMENTS}
    with node.graph.inserting_before(node):
        handed = {key: now[key] if key in now else node.graph.get_attr(path) for key, path in wanted.items()}
    node.kwargs = {**handed, **others}


def _call_norm_alone(node: fx.Node, norm: str | None) -> None:
    alone = next((user for user in node.users if user.meta.get(STANDALONE_NORM)), None)
    if alone is not None and norm is None:
        alone.replace_all_uses_with(node)
        node.graph.erase_node(alone)
    elif alone is None and norm is not None:
        with node.graph.inserting_after(node):
            call = node.graph.call_module(norm)
        node.replace_all_uses_with(call)
        call.args, call.meta[STANDALONE_NORM] = (node,), True  # last, or it would have become its own argument


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    # by children alone: getattr on the way would compute a parametrized parameter
    found: nn.Module | None = model
    for step in path.split("."):
        found = None if found is None else children_of(found).get(step)
    return found
