"""`FusedGraph`: a prepared model that trains on codes where kernels apply and a self-check found the same result."""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from qat.analysis.explain import Row
from qat.codes.check.judging import judge
from qat.codes.evaluating import Evaluator, takes
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
from qat.torch_internals import all_modules_are_hooked, pytree

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("qat")

NO_LIBRARY = "there is no C library (the log says why)"

MOST_FAILURES = 3
"""After so many self-checks in a row for which no step could run, the model is not checked again; nor is evaluation
on integers tried again after so many failures, or changes, in a row."""

UNSETTLED = "what it depends on is another at every forward"


@dataclass
class EngineState:
    """What is known of one model; its copies and pickles begin without."""

    fused: FusedForward | None = None
    probed: frozenset[torch.device] = frozenset()  # the devices on which kernels were tried
    logged: frozenset[str] = frozenset()  # reasons for training plainly
    failures: int = 0  # self-checks in a row for which no step could run
    evaluator: Evaluator | None = None
    rebuilt: int = 0  # evaluators in a row that were made anew, since the model had changed
    agreed: dict[str, bool] = field(default_factory=dict)  # whether programs compute what the model does, by their code

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineState, ()


class FusedGraph(PreparedGraph):
    """A prepared model that trains with a graph derived from its own; see `qat.codes.training.rewriting`."""

    _engine_state: EngineState

    def recompile(self) -> Any:
        """Generate forward from the graph again; in training the fused graph may run in its place."""
        vars(self).setdefault("_engine_state", EngineState())
        code = super().recompile()
        cls: Any = type(self)
        plain: Forward = cls.forward

        @functools.wraps(plain)
        def forward(self: FusedGraph, *args: Any, **kwargs: Any) -> Any:
            evaluator = None if self.training else self._evaluator(args, kwargs)
            if evaluator is not None:
                try:
                    if evaluator.answers(args, kwargs):
                        return evaluator(args, kwargs)
                except (ValueError, RuntimeError) as error:  # a NaN, or inputs that the model refuses in its own words
                    self._give_up(evaluator, error)
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

    def _fused_engine(self) -> "FusedGraph":
        return self

    def _forget(self) -> None:
        """Forget the derived graph too."""
        super()._forget()
        self._engine_state.fused = self._engine_state.evaluator = None

    def _derive(self) -> FusedForward:
        """The fused forward, derived again if the graph or a module changed."""
        found = self._engine_state.fused
        if found is None or not found.watched.holds():
            self._follow_changes()
            known = self._verdicts
            self._engine_state.fused = found = fused_forward(self, known)
            if found.verdict is not None and next(reversed(known)) != found.key:  # `qat.summary` shows the last
                others = {key: verdict for key, verdict in known.items() if key != found.key}
                vars(self)[VERDICTS] = {**others, found.key: found.verdict}
        return found

    @property
    def _verdicts(self) -> dict[str, Verdict]:
        """Results of self-checks, by the key of the graph; a copy of the model keeps them. The present one is last."""
        found: dict[str, Verdict] = vars(self).setdefault(VERDICTS, {})
        return found

    def _self_check(self, *args: Any, **kwargs: Any) -> Verdict | None:
        """Compare a fused training step on a slice of the batch with the plain one; None if none can run on codes."""
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
                state.fused, state.failures = None, 0
                if verdict.reason:
                    log.warning("%s", verdict)
            return self._derive().verdict

    def _check_before_training(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict | None:
        """`_self_check` of a model in training or in evaluation; None if no kernels apply."""
        with evaluating(self):  # at its end every flag is what it was
            self.train()
            if not is_wanted() or plain_here() or self._is_meta_only():
                return None
            self._probe_devices()
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if self._refusal(given, compiling=True) is not None:
                return None
            return self._self_check(*args, **kwargs)

    def _explain(
        self, inputs: tuple[tuple[Any, ...], dict[str, Any]] | None, shapes: Mapping[str, torch.Size]
    ) -> tuple[str, dict[str, Row]]:
        """See `explain_part`."""
        return explain_part(self, inputs, shapes)

    def _probe_devices(self) -> None:
        """Find out which kernels work on the model's devices; under torch.compile nothing can be tried."""
        self._engine_state.probed = devices = frozenset(parameter.device for parameter in self.parameters())
        if any(device.type == "cpu" for device in devices) and compiler.library() is not None:
            for each in onednn.KINDS:
                onednn.are_exact(each)

    def _apply(self, fn: Any, recurse: bool = True) -> "Self":
        """Move as any module does, and probe the device if it is another one."""
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        probed = self._engine_state.probed
        if probed and probed != {parameter.device for parameter in self.parameters()}:
            self._probe_devices()
        return moved

    def train(self, mode: bool = True) -> "Self":
        """Derive the fused graph when training begins: torch.compile can only run a graph that exists already."""
        model = super().train(mode)
        if mode:
            self._engine_state.evaluator = None  # a step may write through `.data`, which nothing counts
            if not self._is_meta_only():
                self._derive()
        return model

    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FusedForward | None:
        """The fused forward, if kernels take these inputs; None for the prepared graph."""
        compiling = torch.compiler.is_compiling()
        if not self.training or self._watched_by() is not None:
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
                self._log_once(f"training runs the prepared graph operation by operation: {refused}")
            return None
        if not compiling and not self._engine_state.probed:
            self._probe_devices()
        fused = self._engine_state.fused if compiling else self._derive()
        if fused is None or fused.graph is None or (compiling and not fused.watched.holds_compiled(self)):
            return None
        if fused.verdict is None and is_wanted():
            if compiling or self._self_check(*args, **kwargs) is None:
                return None
            fused = self._derive()
        return fused

    def _evaluator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Evaluator | None:
        """The model's integer program, if it takes these inputs; None if the model evaluates as it is."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self._watched_by() is not None:
            return None
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not takes(given, next(self.parameters()).device) or self._refusal(given, False) is not None:
            return None
        state, found = self._engine_state, self._engine_state.evaluator
        holds = found is not None and found.state.holds()
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
        """Whether its last evaluation ran an integer program."""
        found = self._engine_state.evaluator
        return found is not None and found.program is not None

    def _give_up(self, evaluator: Evaluator, error: Exception) -> None:
        """Count the failures in a row of an integer program, and leave it after the last; the state stays the same."""
        evaluator.failures += 1
        if evaluator.failures == MOST_FAILURES:
            evaluator.program = None
            self._log_once(f"evaluation runs operation by operation: its integer program fails ({first_line(error)})")

    def _is_in_use(self) -> bool:
        """Whether all ranges are set and in use; before, that it evaluates plainly is no news."""
        quantizers = [each for each in self.modules() if isinstance(each, Quantizer)]
        return all(bool(each.calibrated) and not each.passes for each in quantizers)

    def _watched_by(self) -> str | None:
        """Why only plain operations will do, whatever the inputs are; None if kernels may run."""
        if plain_wanted():
            return "plain_formulas is on"
        watched = not torch.compiler.is_compiling() and plain_here()
        return "something other than autograd looks at every operation" if watched else None

    def _refusal(self, given: list[torch.Tensor], compiling: bool) -> str | None:
        """Why kernels do not apply to these inputs; None if they do."""
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
        """Log why this model computes operation by operation, once for each reason."""
        if reason not in self._engine_state.logged:
            self._engine_state.logged |= {reason}
            log.info("%s", reason)
