"""`FusedGraph`: a prepared model that runs on codes where a self-check allows it."""

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn

from qat.codes.check.judging import judge
from qat.codes.evaluating import Args, Evaluator, Kwargs, supports_inputs
from qat.codes.explain import explain_part
from qat.codes.training.rewriting import FusedForward, fused_forward
from qat.codes.verdict import Verdict, is_wanted
from qat.contexts import evaluating
from qat.graph.patches import capturing_alone
from qat.kernels import passes_values, plain_here, plain_wanted, triton_here
from qat.kernels.cpu import compiler, onednn
from qat.kernels.cpu.compiler import is_loaded  # Dynamo keeps modules of an earlier import, not functions
from qat.kernels.cpu.quantizers import is_plain
from qat.preparation.prepared_graph import Forward, PreparedGraph
from qat.preparation.report import VERDICTS
from qat.quantizer import Quantizer
from qat.text import first_line
from qat.torch_internals import StopRecomputation, all_modules_are_hooked, pytree

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("qat")

NO_LIBRARY = "there is no C library (the log says why)"

MOST_FAILURES = 3
"""Failures in a row after which a self-check or an integer program is given up."""

UNSETTLED = "what it depends on is another at every forward"


@dataclass
class EngineState:
    """Per-model cache of the engine. Copies and pickles start empty."""

    fused: FusedForward | None = None
    probed: frozenset[torch.device] = frozenset()  # the devices on which kernels were tried
    logged: frozenset[str] = frozenset()  # reasons for training plainly
    failures: int = 0  # self-checks in a row for which no step could run
    evaluator: Evaluator | None = None
    rebuilt: int = 0  # evaluators in a row that were made anew, since the model had changed
    agreed: dict[str, bool] = field(default_factory=dict)  # by the code of programs: they compute what the model does

    def __reduce__(self) -> tuple[type["EngineState"], tuple[()]]:
        return EngineState, ()


class FusedGraph(PreparedGraph):
    """A prepared model that trains with a graph derived from its own (`rewriting`)."""

    _engine_state: EngineState

    def recompile(self) -> Any:
        """Generate forward again, which may run the fused graph in the plain one's place."""
        vars(self).setdefault("_engine_state", EngineState())
        code = super().recompile()
        cls: Any = type(self)
        plain: Forward = cls.forward

        @functools.wraps(plain)
        def forward(self: FusedGraph, *args: object, **kwargs: object) -> object:
            evaluator = None if self.training else self._evaluator(args, kwargs)
            if evaluator is not None:
                try:
                    if evaluator.is_proven(args, kwargs):
                        return evaluator(args, kwargs)
                except Exception as error:  # a NaN, or inputs that the model refuses in its own words
                    self._give_up(evaluator, error)
            fused = self._ready(args, kwargs)
            if fused is None or fused.run is None:
                return plain(self, *args, **kwargs)
            if torch.compiler.is_compiling():  # Dynamo guards on the model's modules, and cannot on their tree
                return fused.run(self, *args, **kwargs)
            try:
                return fused.run(fused.modules, *args, **kwargs)
            except StopRecomputation:  # torch.utils.checkpoint has all that it wants
                raise
            except Exception as error:
                why = f"its derived graph fails ({first_line(error)})"
            result = plain(self, *args, **kwargs)  # which raises too if it is for the inputs
            self._verdicts[fused.key] = Verdict(None, why)
            self._engine_state.fused = None
            self._log_once(f"training runs the prepared graph operation by operation: {why}")
            return result

        cls.forward = forward  # of this model alone: torch.fx makes a class for each
        return code

    def _fused_engine(self) -> "FusedGraph":
        return self

    def _forget(self) -> None:
        super()._forget()
        self._engine_state.fused = self._engine_state.evaluator = None

    def _derive(self) -> FusedForward:
        found = self._engine_state.fused
        if found is None or not found.watched.is_unchanged():  # the graph or a module changed
            self._follow_changes()
            known = self._verdicts
            self._engine_state.fused = found = fused_forward(self, known)
            if found.verdict is not None and next(reversed(known)) != found.key:  # `qat.summary` shows the last
                others = {key: verdict for key, verdict in known.items() if key != found.key}
                vars(self)[VERDICTS] = {**others, found.key: found.verdict}
        return found

    @property
    def _verdicts(self) -> dict[str, Verdict]:
        # By the key of the graph, the present one last. A copy of the model keeps them.
        found: dict[str, Verdict] = vars(self).setdefault(VERDICTS, {})
        return found

    def _self_check(self, *args: object, **kwargs: object) -> Verdict | None:
        """Compare a fused step on a slice of the batch with the plain one, if one can run."""
        with capturing_alone:  # a thread that waited finds the verdict
            fused = self._derive()
            if fused.graph is None or fused.verdict is not None:
                return fused.verdict
            verdict, state = judge(self, args, kwargs), self._engine_state
            if verdict is None and not torch.is_inference_mode_enabled():
                state.failures += 1
                if state.failures == MOST_FAILURES:
                    verdict = Verdict(None, f"{MOST_FAILURES} times no step of it could be run apart")
            if verdict is not None:
                self._verdicts[fused.key] = verdict
                state.fused, state.failures = None, 0  # it is derived again, as the verdict says
                if verdict.reason:
                    log.warning("%s", verdict)
            return self._derive().verdict

    def _check_before_training(self, args: Args, kwargs: Kwargs) -> Verdict | None:
        with evaluating(self):  # at its end every flag is what it was
            self.train()
            if not is_wanted() or plain_here() or self._is_meta_only():
                return None
            self._probe_devices()
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if self._refusal(given, compiling=True) is not None:
                return None
            return self._self_check(*args, **kwargs)

    _explain = explain_part

    def _probe_devices(self) -> None:
        # Now, since under torch.compile nothing can be tried.
        self._engine_state.probed = devices = frozenset(parameter.device for parameter in self.parameters())
        if any(device.type == "cpu" for device in devices) and compiler.library() is not None:
            for each in onednn.KINDS:
                onednn.are_exact(each)

    def _apply(self, fn: Any, recurse: bool = True) -> "Self":
        # Another device may have other kernels.
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        probed = self._engine_state.probed
        if probed and probed != {parameter.device for parameter in self.parameters()}:
            self._probe_devices()
        return moved

    def train(self, mode: bool = True) -> "Self":
        """Set the mode, and derive the fused graph when training begins."""
        model = super().train(mode)
        if mode:
            self._engine_state.evaluator = None  # a step may write through `.data`, which nothing counts
            if not self._is_meta_only():
                self._derive()  # now, since torch.compile can only run a graph that exists already
        return model

    def _ready(self, args: Args, kwargs: Kwargs) -> FusedForward | None:
        """Return the fused forward if kernels take these inputs, else None."""
        compiling = torch.compiler.is_compiling()
        if not self.training or self._watched_by() is not None:
            return None
        leaves = (*args, *kwargs.values())
        if any(isinstance(x, (list, tuple, dict)) for x in leaves):
            leaves = tuple(pytree.tree_leaves((args, kwargs)))
        given = cast("list[torch.Tensor]", [x for x in leaves if isinstance(x, (torch.Tensor, fx.Proxy))])
        if not all(type(x) in (torch.Tensor, nn.Parameter) or compiling for x in given):
            return None  # tensors that hold no values, such as those of a tracer
        refused = self._refusal(given, compiling)
        if refused is not None:
            if refused != NO_LIBRARY and not compiling:
                self._log_once(f"training runs the prepared graph operation by operation: {refused}")
            return None
        if not compiling and not self._engine_state.probed:
            self._probe_devices()
        fused = self._engine_state.fused if compiling else self._derive()  # which Dynamo could not trace
        if fused is None or fused.graph is None or (compiling and not fused.watched.holds_compiled(self)):
            return None
        if fused.verdict is None and is_wanted():
            if compiling or self._self_check(*args, **kwargs) is None:
                return None
            fused = self._derive()
        return fused

    def _evaluator(self, args: Args, kwargs: Kwargs) -> Evaluator | None:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self._watched_by() is not None:
            return None
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not supports_inputs(given, next(self.parameters()).device) or self._refusal(given, False) is not None:
            return None
        state, found = self._engine_state, self._engine_state.evaluator
        holds = found is not None and found.state.is_unchanged()
        wasted = found is not None and not holds and found.reason in (None, UNSETTLED)
        state.rebuilt = state.rebuilt + 1 if wasted else 0
        if found is None or not holds or found.reason == UNSETTLED:
            with capturing_alone:
                self._follow_changes()
                found = Evaluator(self, state.agreed, UNSETTLED if state.rebuilt >= MOST_FAILURES else None)
                state.evaluator = found
                if found.reason and self._is_in_use():
                    self._log_once(f"evaluation runs operation by operation: {found.reason}")
        return found if found.program is not None else None

    @property
    def evaluates_on_codes(self) -> bool:
        """Return True if the last evaluation ran an integer program."""
        found = self._engine_state.evaluator
        return found is not None and found.program is not None

    def _give_up(self, evaluator: Evaluator, error: Exception) -> None:
        evaluator.failures += 1
        if evaluator.failures == MOST_FAILURES:
            evaluator.program = None  # and its state stays, so that no other is made
            evaluator.reason = f"its integer program fails ({first_line(error)})"
            self._log_once(f"evaluation runs operation by operation: {evaluator.reason}")

    def _is_in_use(self) -> bool:
        # Until every quantizer is calibrated and enabled, evaluation in float is expected and no news.
        quantizers = [each for each in self.modules() if isinstance(each, Quantizer)]
        return all(bool(each.calibrated) and not each.passes for each in quantizers)

    def _watched_by(self) -> str | None:
        if plain_wanted():
            return "plain_formulas is on"
        watched = not torch.compiler.is_compiling() and plain_here()
        return "something other than autograd looks at every operation" if watched else None

    def _refusal(self, given: list[torch.Tensor], compiling: bool) -> str | None:
        floating = next((x for x in given if x.is_floating_point()), None)
        x = floating if floating is not None else next(iter(given), None)
        x = next(self.parameters()) if x is None else x
        if all_modules_are_hooked():  # type: ignore[no-untyped-call]
            return "a hook on all modules is registered, which waits for each to be called"
        if passes_values(x) and not torch.compiler.is_compiling():
            in_float32 = floating is None or floating.dtype is torch.float32
            if not self.training and not (in_float32 and not torch.is_autocast_enabled(x.device.type)):
                return "its input is not float32, or autocast is on"
            found = triton_here(x.detach(), evaluates=not self.training)
            return None if found is not None else "no kernels in Triton take its input"
        if floating is not None and not is_plain(floating):
            return f"its input is {floating.dtype} on {floating.device.type}"
        if not x.is_cpu:
            return f"there are no kernels for codes on {x.device.type}"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on, and the kernels on the CPU compute in float32"
        return None if (is_loaded() if compiling else compiler.library() is not None) else NO_LIBRARY

    def _log_once(self, reason: str) -> None:
        if reason not in self._engine_state.logged:
            self._engine_state.logged |= {reason}
            log.info("%s", reason)
