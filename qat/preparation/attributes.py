"""The plain attributes of modules, and how they are carried over to the modules that replace them."""

from typing import Any

from torch import fx, nn

from qat.torch_internals import GRAPH_CONSTANT


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
