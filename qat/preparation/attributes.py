"""What other code reads of modules that are replaced: their plain attributes, and the children of containers.

torch.fx makes bare modules of Sequentials and lists, and quantizers stand beside the layers in them. So their children
are noted by name, in the float model's order: `model.layer1[0]`, `len(model.layer4)`, iteration. They have no forward:
a prepared model calls its layers, with their grids, not blocks.
"""

from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from qat.torch_internals import GRAPH_CONSTANT, children_of

CONTAINERS = "qat_containers"
"""Attribute of a graph: the path of every container in it to the names of its children."""


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes besides parameters, buffers, submodules and torch's own: sizes, flags, names."""
    torchs_own = vars(nn.Module()).keys()
    return {
        key: value
        for key, value in vars(module).items()
        if key not in torchs_own and not key.startswith(GRAPH_CONSTANT)
    }


def keep_attributes(attributes: dict[str, Any], module: nn.Module) -> None:
    """Set the attributes that a module lacks, since other code may read them."""
    for key, value in attributes.items():
        if not hasattr(module, key):
            setattr(module, key, value)


def keep_class(original: nn.Module, module: nn.Module) -> None:
    """Give a bare `nn.Module` container the original's class again, so that it has the class's methods."""
    if type(module) is nn.Module and not isinstance(original, fx.GraphModule):
        module.__class__ = type(original)


def scalar_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """Names and values of the numbers, strings and flags that somebody set on a module."""
    plain = (int, float, str, bool, type(None))
    return [
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, plain) and key not in ("training", "shape_env") and not key.startswith("_")
    ]


class Indexed(nn.Module):
    """The children that a container had, by index, slice or name."""

    _names: tuple[str, ...] | None = None

    def __getitem__(self, key: Any) -> Any:
        names, children = self._known(), children_of(self)
        if isinstance(key, slice):
            return [children[name] for name in names[key]]
        return children[key if isinstance(key, str) else names[key]]

    def __len__(self) -> int:
        return len(self._known())

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __bool__(self) -> bool:
        return True

    def _known(self) -> tuple[str, ...]:
        if self._names is None:
            raise TypeError(f"{type(self).__name__!r} was no Sequential, list or dict before it was prepared")
        return self._names


def note_containers(root: nn.Module, graph: nn.Module) -> None:
    """Note the containers of a float model in its graph."""
    found: dict[str, tuple[str, ...]] = {}
    for path, module in root.named_modules():
        if not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            continue
        try:
            twin = graph.get_submodule(path)
        except AttributeError:
            continue  # no layer in it is called
        if twin is graph or type(twin) is nn.Module:
            found[path] = tuple(children_of(module))
            for name, child in module.named_children():
                children_of(twin).setdefault(name, child)
    vars(graph)[CONTAINERS] = found
    restore_containers(graph)


def restore_containers(graph: nn.Module) -> None:
    """Let the containers that are noted in a graph be indexed."""
    for path, names in vars(graph).get(CONTAINERS, {}).items():
        module = graph.get_submodule(path)
        if type(module) is nn.Module:
            module.__class__ = Indexed
        vars(module)["_names"] = names
