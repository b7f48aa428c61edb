"""`PreparedGraph`: a graph module that keeps its notes and plain attributes when it is copied."""

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from qat.kernels import formulas_wanted, plain_here, plain_wanted
from qat.kernels.cpu import onednn
from qat.kernels.cpu.compiler import library
from qat.kernels.dispatch import is_taken
from qat.kernels.formulas.products import try_int_mm
from qat.preparation.attributes import keep_attributes, keep_class, plain_attributes
from qat.preparation.checking import is_wanted, judge
from qat.preparation.fused_graph import FusedForward, fused_forward
from qat.preparation.nodes import Notes, give_notes, notes_of
from qat.preparation.patching import tracing_alone
from qat.preparation.replaced import Places, follow_replacements, module_names
from qat.preparation.report import VERDICTS
from qat.preparation.verdict import Verdict

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("qat")

OF_ONE_MODEL = "GraphModuleImpl"
"""What torch.fx calls the class that it makes for every model; by this name it finds the class behind."""

MOST_FAILURES = 3
"""How often in a row a model is not checked, for a step of it does not run, before that is tried no more."""


class PreparedGraph(fx.GraphModule):
    """An fx.GraphModule whose own attributes (what was left in float, `backbone.out_channels`) survive deepcopy.

    Where kernels apply, training runs a graph derived from it; see `qat.preparation.fused_graph`. That belongs to the
    class, of which torch.fx makes one for every model, so that models pickle and copy without it. What changes in the
    model is noticed at its next forward. Its own names begin with an underscore, so that a model's parts may have any.
    """

    _has_library: ClassVar[bool] = False
    _fused: ClassVar[FusedForward | None] = None
    _places: ClassVar[Places | None] = None
    _said: ClassVar[frozenset[str]] = frozenset()
    _failures: ClassVar[int] = 0

    def recompile(self) -> Any:
        """Make forward anew from the graph."""
        code = super().recompile()
        plain: Any = type(self).forward

        @functools.wraps(plain)
        def forward(self: PreparedGraph, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._follow_changes():
                return self.forward(*args, **kwargs)
            run = self._fused_forward(args, kwargs)
            return plain(self, *args, **kwargs) if run is None else run(self, *args, **kwargs)

        kind: Any = type(self)
        kind.forward, kind._fused, kind._places = forward, None, None
        return code

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
        kind._fused, kind._places = None, Places(self, module_names(self))
        kind._places.warn(known)
        return changed

    def _derive(self) -> FusedForward:
        """What training runs where kernels apply, made anew if the graph or anything in the model changed."""
        kind: Any = type(self)
        found: FusedForward | None = kind._fused
        if found is None or not found.notes.hold():
            kind._fused = found = fused_forward(self, self._verdicts)
            self._look_around()
        return found

    @property
    def _verdicts(self) -> dict[str, Verdict]:
        """What self-checks found, by what they looked at; a copy of the model takes them along."""
        found: dict[str, Verdict] = vars(self).setdefault(VERDICTS, {})
        return found

    def _self_check(self, *args: Any, **kwargs: Any) -> Verdict | None:
        """Hold a fused training step to the plain one; from now on the model trains as that allows.

        Args:
            args, kwargs: of forward; a slice of the batch is looked at.

        Returns:
            What was found; None where nothing runs on codes, or nothing can be found out.
        """
        kind: Any = type(self)
        with tracing_alone():  # who waits finds the verdict there
            fused = self._derive()
            if fused.graph is None or fused.verdict is not None:
                return fused.verdict
            verdict = judge(self, args, kwargs)
            if verdict is None and not torch.is_inference_mode_enabled():
                kind._failures += 1
                if kind._failures == MOST_FAILURES:
                    verdict = Verdict(None, f"{MOST_FAILURES} times no step of it could be run apart")
            if verdict is not None:
                self._verdicts[fused.key] = verdict
                kind._fused, kind._failures = None, 0
                if verdict.reason:
                    log.warning("%s", verdict)
            return self._derive().verdict

    def _prove(self, *args: Any, **kwargs: Any) -> Verdict | None:
        """`_self_check` ahead of training, in whatever mode the model is; None where no kernels apply."""
        flags = [(module, module.training) for module in self.modules()]
        try:
            self.train()
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if (
                not is_wanted()
                or plain_here()
                or self._is_meta_only()
                or self._refusal(given, compiling=True) is not None
            ):
                return None
            return self._self_check(*args, **kwargs)
        finally:
            for module, flag in flags:
                module.training = flag

    def _look_around(self) -> None:
        """What there is where the model lies: now, since nothing can be tried out while torch.compile looks on."""
        kind: Any = type(self)
        devices = {parameter.device for parameter in self.parameters()}
        if any(device.type == "cpu" for device in devices) and library() is not None:
            kind._has_library = True
            for each in onednn.KINDS:
                onednn.are_exact(each)
        for device in devices:
            if device.type == "cuda" or formulas_wanted():
                try_int_mm(device)

    def train(self, mode: bool = True) -> "Self":
        """As of any module; torch.compile, which may come next, can only run what is derived already."""
        model = super().train(mode)
        if not self._is_meta_only():
            self._follow_changes()
            if mode:
                self._derive()
                self._look_around()  # the model may have been moved
        return model

    def _is_meta_only(self) -> bool:
        """Whether the model has no memory that kernels could compute in."""
        return not any(parameter.device.type in ("cpu", "cuda") for parameter in self.parameters())

    def _fused_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What to run instead of the graph, if these inputs are for the kernels."""
        compiling = torch.compiler.is_compiling()
        if not self.training or (plain_wanted() if compiling else plain_here()):
            return None
        leaves = (*args, *kwargs.values())
        if any(isinstance(x, (list, tuple, dict)) for x in leaves):
            leaves = tuple(pytree.tree_leaves((args, kwargs)))
        given: list[Any] = [x for x in leaves if isinstance(x, (torch.Tensor, fx.Proxy))]
        if not all(type(x) in (torch.Tensor, nn.Parameter) or compiling for x in given):
            return None  # somebody looks at the model with tensors that hold no numbers
        refused = self._refusal(given, compiling)
        if refused is not None:
            if refused and not compiling:
                self._say(refused)
            return None
        fused = type(self)._fused if compiling else self._derive()
        if fused is None or fused.graph is None or (compiling and not fused.fits(self)):
            return None
        if fused.verdict is None and is_wanted():
            if compiling or self._self_check(*args, **kwargs) is None:
                return None
            fused = self._derive()
        return fused.run

    def _refusal(self, given: list[torch.Tensor], compiling: bool) -> str | None:
        """Why kernels do not apply here, None if they do: on CUDA those that torch.compile makes of formulas, else
        those in C. Empty where somebody said so already."""
        floating = next((x for x in given if x.is_floating_point()), None)
        x = floating if floating is not None else next(iter(given), None)
        x = next(self.parameters()) if x is None else x
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            return "a hook on all modules is registered, which waits for each to be called"
        if floating is not None and not is_taken(floating):
            return f"its input is {floating.dtype} on {floating.device.type}"
        if x.is_cuda:
            return None if compiling else ""
        if formulas_wanted():
            return None
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on, and the kernels on the CPU compute in float32"
        return None if (type(self)._has_library if compiling else library() is not None) else ""

    def _say(self, reason: str) -> None:
        """Tell the log why this model trains as its graph stands, once for each reason."""
        kind: Any = type(self)
        if reason not in kind._said:
            kind._said |= {reason}
            log.info("training runs the prepared graph operation by operation: %s", reason)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which would make a plain graph module of it."""
        function, arguments = super().__reduce__()
        arguments[0].pop(VERDICTS, None)  # of this machine
        kind = next(base for base in type(self).__mro__ if base.__qualname__.split(".")[-1] != OF_ONE_MODEL)
        passing = {name: set(module._non_persistent_buffers_set) for name, module in self.named_modules()}
        return unpickled, (kind, function, arguments, passing, notes_of(self.graph))

    def __deepcopy__(self, memo: dict[int, Any]) -> "PreparedGraph":
        twin: Any = super().__deepcopy__(memo)
        for name, module in self.named_modules():
            part = twin.get_submodule(name)
            keep_class(module, part)
            keep_attributes(copy.deepcopy(plain_attributes(module), memo), part)
            part._non_persistent_buffers_set |= module._non_persistent_buffers_set  # which torch 2.11 forgets
        same: PreparedGraph = twin
        return same


class PreparedPart(PreparedGraph):
    """A part of a model that is prepared in parts: it has the methods of the float module too, for the rest to call.

    Attributes:
        float_class: the class of the module that it stands for.
    """

    def __getattr__(self, name: str) -> Any:
        """What torch knows of it, else what the float module's class has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            kept = vars(self).get("float_class", nn.Module)
            found = inspect.getattr_static(kept, name, None)
            if found is None:
                raise
            return found.__get__(self, kept) if hasattr(found, "__get__") else found


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
