"""What modules have besides parameters, buffers and submodules, and how it goes along to what stands for them."""

from typing import Any

from torch import fx, nn


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module has besides parameters, buffers, submodules and torch's own notes: sizes, flags, names."""
    torchs_own = vars(nn.Module()).keys()
    return {
        key: value
        for key, value in vars(module).items()
        if key not in torchs_own and not key.startswith("_tensor_constant")
    }


def keep_attributes(attributes: dict[str, Any], module: nn.Module) -> None:
    """Give a module those of the attributes that it lacks: what other code may ask it for."""
    for key, value in attributes.items():
        if not hasattr(module, key):
            setattr(module, key, value)


def keep_class(original: nn.Module, module: nn.Module) -> None:
    """Make a bare container of parameters and submodules one of the original's class again, for its methods."""
    if type(module) is nn.Module and not isinstance(original, fx.GraphModule):
        module.__class__ = type(original)


def numbers_of_block(module: nn.Module) -> list[tuple[str, object]]:
    """Numbers, words and flags that somebody gave a block, and what they are now."""
    plain = (int, float, str, bool, type(None))
    return [
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, plain) and key not in ("training", "shape_env") and not key.startswith("_")
    ]
