"""`FusedGraph`: a prepared model that trains on codes where kernels apply and a self-check found the same result."""

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx, nn

from qat.fused.explaining import rows_of
from qat.fused.plan import CodesPlan
from qat.fused.rewriting import FusedForward, fused_forward
from qat.fused.self_check.judging import is_wanted, judge
from qat.kernels import formulas_wanted, plain_here, plain_wanted
from qat.kernels.cpu import compiler, onednn
from qat.kernels.cpu.compiler import is_loaded  # Dynamo keeps modules of an earlier import, not functions
from qat.kernels.dispatch import is_taken
from qat.kernels.formulas.products import try_int_mm
from qat.preparation.explanation import PLAINLY, Explanation
from qat.preparation.prepared_graph import Forward, PreparedGraph
from qat.preparation.report import VERDICTS
from qat.preparation.verdict import Verdict
from qat.quantizer import Quantizer
from qat.torch_internals import all_modules_are_hooked, pytree
from qat.tracing.patches import tracing_alone

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("qat")

EVALUATED = "is in evaluation, where its graph runs operation by operation"
NO_MEMORY = "it has no memory to compute in (device meta)"
ON_CUDA = "on CUDA the kernels are those that torch.compile makes of the whole model"
NO_LIBRARY = "there is no C library (the log says why)"

MOST_FAILURES = 3
"""After so many self-checks in a row for which no step could run, the model is not checked again."""


class FusedGraph(PreparedGraph):
    """A prepared model that trains with a graph derived from its own; see `qat.fused.rewriting`."""

    _fused: ClassVar[FusedForward | None] = None
    _looked_at: ClassVar[frozenset[torch.device]] = frozenset()
    _said: ClassVar[frozenset[str]] = frozenset()
    _failures: ClassVar[int] = 0

    def recompile(self) -> Any:
        """Generate forward from the graph again; in training the fused graph may run in its place."""
        code = super().recompile()
        cls: Any = type(self)
        plain: Forward = cls.forward

        @functools.wraps(plain)
        def forward(self: FusedGraph, *args: Any, **kwargs: Any) -> Any:
            fused = self._ready(args, kwargs)
            if fused is None or fused.run is None:
                return plain(self, *args, **kwargs)
            if torch.compiler.is_compiling():
                return fused.run(self, *args, **kwargs)
            try:
                return fused.run(fused.modules, *args, **kwargs)
            except (AttributeError, TypeError) as error:
                self._name_left_out(error, args, kwargs)
                raise

        cls.forward = forward
        return code

    def _forget(self) -> None:
        """Forget the derived graph too."""
        super()._forget()
        kind: Any = type(self)
        kind._fused = None

    def _derive(self) -> FusedForward:
        """The fused forward, derived again if the graph or a module changed."""
        kind: Any = type(self)
        found: FusedForward | None = kind._fused
        if found is None or not found.state.holds():
            self._follow_changes()
            kind._fused = found = fused_forward(self, self._verdicts)
        return found

    @property
    def _verdicts(self) -> dict[str, Verdict]:
        """Results of self-checks, by the key of the graph; a copy of the model keeps them."""
        found: dict[str, Verdict] = vars(self).setdefault(VERDICTS, {})
        return found

    def _self_check(self, *args: Any, **kwargs: Any) -> Verdict | None:
        """Compare a fused training step with the plain one; the model trains accordingly from now on.

        Args:
            args, kwargs: of forward; a slice of the batch is used.

        Returns:
            The result; None if nothing runs on codes, or if no step can run.
        """
        kind: Any = type(self)
        with tracing_alone():  # a thread that waited finds the verdict
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
        """`_self_check` before training, whether the model is in training or evaluation; None if no kernels apply."""
        flags = [(module, module.training) for module in self.modules()]
        try:
            self.train()
            if not is_wanted() or plain_here() or self._is_meta_only():
                return None
            self._look_around()
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if self._refusal(given, compiling=True) is not None:
                return None
            return self._self_check(*args, **kwargs)
        finally:
            for module, flag in flags:
                module.training = flag

    def _verdict(self) -> Verdict | None:
        """The verdict on the model as it is now, else the last one."""
        fused, earlier = type(self)._fused, list(self._verdicts.values())[-1:]
        now = [] if fused is None or fused.verdict is None else [fused.verdict]
        return next(iter(now + earlier), None)

    def _explain(
        self, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None, shapes: Mapping[str, torch.Size]
    ) -> Explanation:
        """See `PreparedGraph._explain`. A model in evaluation is put into training to look, and back."""
        flags = [(module, module.training) for module in self.modules()]
        evaluated = None if self.training else EVALUATED
        try:
            if not self.training:
                self.train()
            given = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
            compiling = next(self.parameters()).is_cuda
            whole = NO_MEMORY if self._is_meta_only() else self._watched() or self._refusal(given, compiling)
            fused = self._derive()
            verdict, distrusted = fused.verdict, () if fused.verdict is None else fused.verdict.distrusted
            if whole is None and distrusted is None:
                whole = str(verdict and verdict.reason)
            plan = CodesPlan(self, distrusted or ())
            if whole is None and not plan.readers:
                quantizers = [
                    each for each in self.modules() if isinstance(each, Quantizer) and each.role == "activation"
                ]
                known = not quantizers or any(each.is_calibrated for each in quantizers)
                whole = "no layer of it takes codes" if known else "it is not calibrated"
            rows = rows_of(plan, whole, shapes)
        finally:
            for module, flag in flags:
                module.training = flag
        if whole is not None:
            how = f"trains {PLAINLY}: {whole}"
        elif verdict is None and is_wanted():
            how = (
                "trains on codes as soon as a self-check (calibrate, self_check, a step) has shown that to be the same"
            )
        elif verdict is None:
            how = "trains on codes, without a self-check (QAT_SELF_CHECK=off)"
        else:
            how = str(verdict)
        if compiling and whole is None:
            how += f"; uncompiled it trains {PLAINLY}: {ON_CUDA}"
        return Explanation(how if evaluated is None else f"{evaluated}; in training it {how}", rows)

    def _look_around(self) -> None:
        """Find out which kernels work on the model's devices; under torch.compile nothing can be tried."""
        kind: Any = type(self)
        devices = frozenset(parameter.device for parameter in self.parameters())
        kind._looked_at = devices
        if any(device.type == "cpu" for device in devices) and compiler.library() is not None:
            for each in onednn.KINDS:
                onednn.are_exact(each)
        for device in devices:
            if device.type == "cuda" or formulas_wanted():
                try_int_mm(device)

    def _apply(self, fn: Any, recurse: bool = True) -> "Self":
        """Move as any module does, and look around if the device changed."""
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._looked_at and self._looked_at != {parameter.device for parameter in self.parameters()}:
            self._look_around()
        return moved

    def train(self, mode: bool = True) -> "Self":
        """Derive the fused graph when training begins: torch.compile can only run a graph that exists already."""
        model = super().train(mode)
        if mode and not self._is_meta_only():
            self._derive()
        return model

    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FusedForward | None:
        """The fused forward, if kernels take these inputs; None for the prepared graph."""
        compiling = torch.compiler.is_compiling()
        if not self.training or self._watched() is not None:
            return None
        leaves = (*args, *kwargs.values())
        if any(isinstance(x, (list, tuple, dict)) for x in leaves):
            leaves = tuple(pytree.tree_leaves((args, kwargs)))
        given: list[Any] = [x for x in leaves if isinstance(x, (torch.Tensor, fx.Proxy))]
        if not all(type(x) in (torch.Tensor, nn.Parameter) or compiling for x in given):
            return None  # tensors that hold no values, such as those of a tracer
        refused = self._refusal(given, compiling)
        if refused is not None:
            if refused != NO_LIBRARY and not compiling:
                self._say(refused)
            return None
        if not compiling and not self._looked_at:
            self._look_around()
        fused = type(self)._fused if compiling else self._derive()
        if fused is None or fused.graph is None or (compiling and not fused.fits(self)):
            return None
        if fused.verdict is None and is_wanted():
            if compiling or self._self_check(*args, **kwargs) is None:
                return None
            fused = self._derive()
        return fused

    def _watched(self) -> str | None:
        """Why only plain operations will do, whatever the inputs are; None if kernels may run."""
        if plain_wanted():
            return "plain_formulas is on"
        watched = not torch.compiler.is_compiling() and plain_here()
        return "something other than autograd looks at every operation" if watched else None

    def _refusal(self, given: list[torch.Tensor], compiling: bool) -> str | None:
        """Why kernels do not apply to these inputs; None if they do.

        On CUDA the kernels are those that torch.compile makes of formulas, on the CPU those in C.
        """
        floating = next((x for x in given if x.is_floating_point()), None)
        x = floating if floating is not None else next(iter(given), None)
        x = next(self.parameters()) if x is None else x
        if all_modules_are_hooked():  # type: ignore[no-untyped-call]
            return "a hook on all modules is registered, which waits for each to be called"
        if floating is not None and not is_taken(floating):
            return f"its input is {floating.dtype} on {floating.device.type}"
        if x.is_cuda:
            return None if compiling else ON_CUDA
        if formulas_wanted():
            return None
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on, and the kernels on the CPU compute in float32"
        return None if (is_loaded() if compiling else compiler.library() is not None) else NO_LIBRARY

    def _say(self, reason: str) -> None:
        """Log why this model trains operation by operation, once for each reason."""
        kind: Any = type(self)
        if reason not in kind._said:
            kind._said |= {reason}
            log.info("training runs the prepared graph operation by operation: %s", reason)
