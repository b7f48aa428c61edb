"""Side effects of a forward on the model, undone and, where they matter, detected."""

import copy
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from qat.inputs import copied
from qat.torch_internals import BUFFERS, GRAPH_CONSTANT, buffers_of, hooks_of, parameters_of, pytree, version_of

PLAIN = (bool, int, float, complex, str, type(None))
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
TORCHS_OWN = frozenset(vars(nn.Module()))


class Change(NamedTuple):
    """An attribute that a forward changed, by its name in the model."""

    name: str
    is_new: bool
    holds_tensor: bool = False  # now


class CaptureError(ValueError):
    """Raised if a model or submodule cannot be traced as one graph; says why."""


class LostStateError(CaptureError):
    """Raised if a graph would not change the model's state as its forward does."""


@contextmanager
def restoring_state(model: nn.Module) -> Iterator[list[Change]]:
    """Restore attributes, hooks and buffers of all modules at the end.

    The context's value is a list, to which its end adds the attributes that changed, if they can be compared.
    """
    modules = list(model.named_modules())
    notes = [(module, {key: copy.copy(value) for key, value in _plain(module).items()}) for _, module in modules]
    hooked = [(hooks, dict(hooks)) for _, module in modules for hooks in hooks_of(module)]
    told = [{key: (value, _comparable(value)) for key, value in _own(module).items()} for _, module in modules]
    buffers = [
        (buffer, version_of(buffer), buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_inference()
    ]
    changed: list[Change] = []
    try:
        yield changed
    finally:
        for (name, module), before in zip(modules, told, strict=True):
            changed += _changes(name, module, before)
        for module, noted in notes:
            for key in _plain(module):
                if key not in noted and not key.startswith(GRAPH_CONSTANT):
                    del module.__dict__[key]
            module.__dict__.update(noted)
        for hooks, registered in hooked:
            hooks.clear()  # in place: torch keeps references to these dicts
            hooks.update(registered)
        with torch.no_grad():
            for buffer, version, value in buffers:
                # F.batch_norm writes running statistics without a new version.
                if version_of(buffer) != version or not (buffer.is_meta or torch.equal(buffer, value)):
                    buffer.copy_(value)


def _changes(name: str, module: nn.Module, before: dict[str, tuple[object, object]]) -> Iterator[Change]:
    for key, value in _own(module).items():
        default = getattr(
            type(module), key, _comparable
        )  # what is set on the class; a function, which has no comparable form, if nothing is
        old, known = before.get(key, (default, _comparable(default)))
        is_new = key not in before and known is None
        if isinstance(value, Tensor) and value is not old:
            yield Change(f"{name}.{key}".lstrip("."), key not in before, True)
        elif (known is not None or is_new) and _comparable(value) != known:
            yield Change(f"{name}.{key}".lstrip("."), is_new)


def _own(module: nn.Module) -> dict[str, object]:
    return {key: value for key, value in vars(module).items() if key not in TORCHS_OWN}


def _plain(module: nn.Module) -> dict[str, object]:
    types = (list, dict, tuple, int, float, str, type(None))
    plain = {key: value for key, value in _own(module).items() if isinstance(value, types)}
    return {**plain, BUFFERS: buffers_of(module)}


def _comparable(value: object) -> object:
    # A form of the value that can be compared; None if there is none.
    if type(value) in PLAIN:
        return (value,)
    if isinstance(value, GENERATORS):
        return pickle.dumps(value)  # a draw changes what is inside
    if type(value) in (list, tuple, dict):
        leaves, shape = pytree.tree_flatten(value)
        if all(type(leaf) in PLAIN for leaf in leaves):
            return leaves, shape
    return None


def changed_by_mode(module: nn.Module) -> str | None:
    """Name an attribute that a module's own `train()` or `eval()` changes, or None."""
    if type(module).train is nn.Module.train and type(module).eval is nn.Module.eval:
        return None
    own = copy.deepcopy(module)  # switching the user's module would change it
    own.train()
    own.eval()  # now caches of the float model are cleared
    before: dict[str, object] = copied(state_of(own))
    for training in (True, False):
        _ = own.train() if training else own.eval()
        after = state_of(own)
        for name in before | after:
            expected = training if name.rpartition(".")[2] == "training" else before.get(name)
            if not is_equal(expected, after.get(name)):
                return name
    return None


def state_of(module: nn.Module) -> dict[str, object]:
    """Return modes, attributes, parameters and buffers by name, of submodules too."""
    return {
        f"{path}.{key}".lstrip("."): value
        for path, part in module.named_modules()
        for key, value in {"training": part.training, **_own(part), **parameters_of(part), **buffers_of(part)}.items()
    }


def is_equal(one: object, other: object) -> bool:
    """Return True if two values are equal: tensors, plain values, containers of these."""
    (leaves, shape), (others, other_shape) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return shape == other_shape and all(
        torch.equal(a, b)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and _comparable(a) == _comparable(b)
        for a, b in zip(leaves, others, strict=True)
    )
