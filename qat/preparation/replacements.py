"""Parts that were replaced after preparation: a new head, another activation, an adapter around a layer.

A quantized layer is handed its input's grid and its BatchNorm; anything else is called as it would be in the float
model, and what it was not handed runs by itself.
"""

import logging

from torch import fx, nn

from qat.layers import QuantLayer
from qat.preparation.attributes import numbers_of_block
from qat.preparation.hooks import is_watched
from qat.preparation.swapping import folds
from qat.quantizer import Quantizer
from qat.tracing.nodes import submodule_of

HANDED = ("input_quantizer", "other_quantizer", "norm")
"""Keyword arguments that preparation adds to a layer's call; each is a module."""

AS_PREPARED = "qat_handed"
"""Key of node.meta: what the call was handed when the model was prepared, keyword to path."""

FOR_ITSELF = "qat_for_itself"
"""Key of node.meta of a norm's call that stands for what its layer was handed before."""

log = logging.getLogger("qat")


class Places:
    """Which module lies where in a model, of those that its graph calls or hands to others.

    Args:
        model: the model.
        names: of these modules.
    """

    def __init__(self, model: nn.Module, names: set[str]) -> None:
        steps = {name.rsplit(".", up)[0] for name in names for up in range(name.count(".") + 1)}
        self.modules = {name: model.get_submodule(name) for name in sorted(steps)}
        self._children = [
            (model.get_submodule(name.rpartition(".")[0])._modules, name.rpartition(".")[2], module)
            for name, module in self.modules.items()
        ]
        self._containers = [(name, module) for name, module in self.modules.items() if name not in names]
        around = [("", model), *self._containers]
        self._read = [(name, vars(module), *found) for name, module in around for found in numbers_of_block(module)]
        self.deaf = {name for name, module in self._containers if is_watched(module)}

    def hold(self) -> bool:
        """Whether the same modules are still there, and nobody waits for others to be called than before."""
        for children, name, module in self._children:
            if children.get(name) is not module:
                return False
        if any(attributes.get(key) != value for _, attributes, key, value in self._read):
            return False
        return all(is_watched(module) is (name in self.deaf) for name, module in self._containers)

    def warn_of_numbers(self) -> None:
        """Say which attributes of the model and its blocks are not what they were: a graph does not ask for them."""
        for name, attributes, key, value in self._read:
            if attributes.get(key) != value:
                log.warning(
                    "%r changed, and what forward computed from it is fixed since the model was prepared; prepare it"
                    " again if it reads that", f"{name}.{key}".lstrip("."),
                )  # fmt: skip

    def warn(self, known: set[str]) -> None:
        """Say which hooks never fire: those of containers, which a graph does not call."""
        for name in sorted(self.deaf - known):
            log.warning(
                "a hook or a patched forward of %r never runs, for a prepared model calls the layers in it and not"
                " itself; take its features with qat.feature_extractor(model, [%r])", name, name,
            )  # fmt: skip


def module_names(model: fx.GraphModule) -> set[str]:
    """The modules that a graph calls or hands to others, and the weight quantizers of its layers."""
    names = {
        str(node.target)
        for node in model.graph.nodes
        if node.op == "call_module" or (node.op == "get_attr" and _module_at(model, str(node.target)) is not None)
    }
    layers = {name for name in names if isinstance(model.get_submodule(name), QuantLayer)}
    return names | {f"{name}.weight_quantizer" for name in layers}


def follow_replacements(model: fx.GraphModule) -> bool:
    """Make every call fit the module that is there now.

    Returns:
        Whether a call changed; the graph has to be compiled anew then.

    Raises:
        ValueError: if a module that is called is gone.
    """
    changed = False
    for node in list(model.graph.nodes):
        _require_called(node, model)
        now = {key: value for key, value in node.kwargs.items() if key in HANDED and isinstance(value, fx.Node)}
        paths = node.meta.get(AS_PREPARED, {key: str(value.target) for key, value in now.items()})
        if node.op != "call_module" or not paths:
            continue
        wanted = {key: path for key, path in paths.items() if _takes(node, key, path, model)}
        if wanted.keys() == now.keys():
            continue
        changed = True
        node.meta[AS_PREPARED] = paths
        _hand(node, wanted, now)
        _run_for_itself(node, None if "norm" in wanted else paths.get("norm"))
    if changed:
        for node in reversed(list(model.graph.nodes)):
            if node.op == "get_attr" and not node.users:
                model.graph.erase_node(node)
        model.graph.lint()
    return changed


def _require_called(node: fx.Node, model: nn.Module) -> None:
    """Raise ValueError if what a node calls is gone, for something else lies where its block was."""
    steps = str(node.target).split(".") if node.op == "call_module" else []
    for depth in range(1, len(steps) + 1):
        if _module_at(model, ".".join(steps[:depth])) is None:
            block = ".".join(steps[: depth - 1])
            now = type(_module_at(model, block)).__name__ if block else "this model"
            raise ValueError(
                f"{node.target!r} is called by the prepared model, and {block or now!r} ({now}) has no such part now;"
                " replace layers one by one, or prepare the changed model again"
            )


def _takes(node: fx.Node, key: str, path: str, model: fx.GraphModule) -> bool:
    """Whether the module that a node calls takes what lies at a path as this keyword argument."""
    module, handed = submodule_of(model, node), _module_at(model, path)
    if not isinstance(module, QuantLayer):
        return False
    if key == "norm":
        return folds(module, handed, node) and getattr(handed, "running_var", None) is not None
    return isinstance(handed, Quantizer)


def _hand(node: fx.Node, wanted: dict[str, str], now: dict[str, fx.Node]) -> None:
    others = {key: value for key, value in node.kwargs.items() if key not in HANDED}
    with node.graph.inserting_before(node):
        handed = {key: now[key] if key in now else node.graph.get_attr(path) for key, path in wanted.items()}
    node.kwargs = {**handed, **others}


def _run_for_itself(node: fx.Node, norm: str | None) -> None:
    """Call the norm at this path behind a layer that is not handed it; None: it is."""
    alone = next((user for user in node.users if user.meta.get(FOR_ITSELF)), None)
    if alone is not None and norm is None:
        alone.replace_all_uses_with(node)
        node.graph.erase_node(alone)
    elif alone is None and norm is not None:
        with node.graph.inserting_after(node):
            call = node.graph.call_module(norm)
        node.replace_all_uses_with(call)
        call.args, call.meta[FOR_ITSELF] = (node,), True


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, None if there is none; a parameter is not looked at, which may have to be computed."""
    found: nn.Module | None = model
    for step in path.split("."):
        found = None if found is None else found._modules.get(step)
    return found
