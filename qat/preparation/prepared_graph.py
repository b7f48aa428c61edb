"""`PreparedGraph`: a prepared model as a graph that notices what is replaced in it, and copies and pickles whole."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from qat.preparation.attributes import keep_attributes, keep_class, plain_attributes
from qat.preparation.replacements import Places, follow_replacements, module_names
from qat.preparation.report import VERDICTS
from qat.preparation.verdict import Verdict
from qat.tracing.nodes import Notes, give_notes, notes_of

if TYPE_CHECKING:
    from typing_extensions import Self

OF_ONE_MODEL = "GraphModuleImpl"
"""What torch.fx calls the class that it makes for every model; by this name it finds the class behind."""

Forward = Callable[..., Any]
"""A function of a prepared model and its inputs."""


class PreparedGraph(fx.GraphModule):
    """A traced model, or a traced part of one, whose layers and weights are quantized.

    What is replaced in the model is noticed at its next forward. Its own attributes (what was left in float,
    `backbone.out_channels`) survive copies and pickles; what it knows of the moment belongs to the class, of which
    torch.fx makes one for every model. Its own names begin with an underscore, so that a model's parts may have any.

    Attributes:
        float_class: of a part of a model, the class of the module that it stands for: the rest of the model may call
            that one's methods.
    """

    _places: ClassVar[Places | None] = None

    def recompile(self) -> Any:
        """Make forward anew from the graph."""
        code = super().recompile()
        plain: Any = type(self).forward

        @functools.wraps(plain)
        def forward(self: PreparedGraph, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._follow_changes():
                return self.forward(*args, **kwargs)
            run = self._training_forward(args, kwargs)
            return plain(self, *args, **kwargs) if run is None else run(self, *args, **kwargs)

        kind: Any = type(self)
        kind.forward = forward
        self._forget()
        return code

    def _training_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward | None:
        """What computes the same faster for these inputs; None: the graph itself runs."""
        return None

    def _prove(self, *args: Any, **kwargs: Any) -> Verdict | None:
        """Hold what computes faster to the graph, on these inputs; None where there is nothing of the kind."""
        return None

    def _verdict(self) -> Verdict | None:
        """What `_prove` found of the model as it is now, or last."""
        return None

    def _forget(self) -> None:
        """Take for granted nothing of what the model was."""
        kind: Any = type(self)
        kind._places = None

    def _follow_changes(self) -> bool:
        """Notice parts that were replaced, and call what is there now as it wants to be called.

        Returns:
            Whether the graph changed.
        """
        kind: Any = type(self)
        if kind._places is not None and kind._places.hold():
            return False
        known = set()
        if kind._places is not None:
            kind._places.warn_of_numbers()
            known = kind._places.deaf
        changed = follow_replacements(self)
        if changed:
            self.recompile()
        self._forget()
        kind._places = Places(self, module_names(self))
        kind._places.warn(known)
        return changed

    def train(self, mode: bool = True) -> "Self":
        """As of any module; torch.compile, which may come next, cannot look for parts that were replaced."""
        model = super().train(mode)
        if not self._is_meta_only():
            self._follow_changes()
        return model

    def _is_meta_only(self) -> bool:
        """Whether the model has no memory to compute in."""
        return not any(parameter.device.type in ("cpu", "cuda") for parameter in self.parameters())

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which would make a plain graph module of it."""
        function, arguments = super().__reduce__()
        arguments[0].pop(VERDICTS, None)  # of this machine
        passing = {name: set(module._non_persistent_buffers_set) for name, module in self.named_modules()}
        return unpickled, (class_of(self), function, arguments, passing, notes_of(self.graph))

    def __deepcopy__(self, memo: dict[int, Any]) -> "PreparedGraph":
        twin: Any = super().__deepcopy__(memo)
        for name, module in self.named_modules():
            part = twin.get_submodule(name)
            keep_class(module, part)
            keep_attributes(copy.deepcopy(plain_attributes(module), memo), part)
            part._non_persistent_buffers_set |= module._non_persistent_buffers_set  # which torch 2.11 forgets
        same: PreparedGraph = twin
        return same

    def __getattr__(self, name: str) -> Any:
        """What torch knows of it, else what `float_class` has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            kept = vars(self).get("float_class")
            found = None if kept is None else inspect.getattr_static(kept, name, None)
            if found is None:
                raise
            return found.__get__(self, kept) if hasattr(found, "__get__") else found


def class_of(model: PreparedGraph) -> type[PreparedGraph]:
    """The class that a model has beside the one that torch.fx made for it alone."""
    return next(base for base in type(model).__mro__ if base.__qualname__.split(".")[-1] != OF_ONE_MODEL)


def unpickled(
    kind: type[PreparedGraph], function: Callable[..., Any], arguments: tuple[Any, ...], passing: dict[str, set[str]],
    notes: Notes,
) -> PreparedGraph:  # fmt: skip
    """The model from what `PreparedGraph.__reduce__` gave to pickle.

    Args:
        kind: its class.
        function, arguments: what torch.fx makes of it; the graph is recorded anew from its code.
        passing: buffers that are in no checkpoint.
        notes: of the graph's nodes.
    """
    model: Any = function(*arguments)
    own = type(OF_ONE_MODEL, (kind,), {})
    own.__name__ = type(model).__name__  # what it prints as
    model.__class__ = own
    give_notes(model.graph, notes)
    model.recompile()
    for name, buffers in passing.items():
        model.get_submodule(name)._non_persistent_buffers_set |= buffers  # which torch 2.11 forgets
    same: PreparedGraph = model
    return same
