"""`check`: compares all ways to compute a program's model."""

import contextlib
import copy
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

import qat
from qat.codes.graph import FusedGraph
from qat.export.converted import Execution
from qat.kernels import plain_formulas as plain
from qat.torch_internals import pytree
from tests.fuzz.agreement import Results, beyond_noise, differing, nudged
from tests.fuzz.generation import generate
from tests.fuzz.program import Program
from tests.fuzz.runtime import against_litert, against_runtime
from tests.fuzz.steps import Context, Stepper, even_dropouts, fast
from tests.references.prepared_case import without_quantizers

ATTEMPTS, NEEDED, NOISY_RUNS = 6, 3, 5
"""The most inputs drawn, how many of them must differ for a verdict, and runs under noise for each that differs."""

ONE_VALUE = "Expected more than 1 value per channel"
"""Torch's error for a batch without variance; programs whose float step raises it are checked all the same."""

SAID = ("modified by an inplace operation", "view size is not compatible", "prepare the changed model again")
"""Torch's errors when a changed module overwrites a tensor that backward needs, which a kernel that saves codes avoids,
and for a memory format of which it takes no view, where `prepare` reshapes; ours where a change cannot be followed."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of checking a program.

    Attributes:
        kind: "agrees"; "discarded" if torch itself refuses the model; "refused" if `prepare` refuses it in a sentence,
            or if torch refuses the plain graph, but not the fast one, because it overwrites a tensor that backward
            needs; "unclear" if noise explains the differences for all inputs; "fails".
        stage: what was compared, or who refused.
        detail: what differs most, or the error message.
        litert: whether LiteRT takes the model, and computes its integers.
    """

    kind: str
    stage: str = ""
    detail: str = ""
    litert: bool = False

    def is_like(self, other: "Verdict") -> bool:
        """Whether both are the same finding; messages of refusals are compared without their numbers."""
        told = [re.sub(r"[\d\[\],]+", "", verdict.detail)[:120] for verdict in (self, other)]
        return (self.kind, self.stage) == (other.kind, other.stage) and ("differs" in self.stage or told[0] == told[1])


class Failure(Exception):  # noqa: N818
    """Two ways differ; args: stage and detail."""


class Refused(Exception):  # noqa: N818
    """Torch refuses the reference; args: stage and sentence."""


class Unclear(Exception):  # noqa: N818
    """With every input drawn, noise explains the difference."""


def check(program: Program, runtime: bool = False, compiled: bool = False) -> Verdict:
    """Build the program's model, prepare it, and compare.

    Args:
        program: what to build.
        runtime: export it too, and compare with ONNX Runtime.
        compiled: compare with torch.compile too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the random programs
        return _verdict(program, runtime, compiled)


def _verdict(program: Program, runtime: bool, compiled: bool) -> Verdict:
    try:
        model = program.build()
        given = tuple(x.detach() for x in program.draw())
        _float_step(program, model)
    except Exception as error:
        return Verdict("discarded", "float", _first_line(error))
    try:
        prepared = qat.prepare(model, eval(program.recipe, vars(qat)), example_inputs=given)
        qat.calibrate(prepared, [(given,)])
    except ValueError as error:
        return Verdict("refused", "prepare", _first_line(error))
    except Exception as error:
        return Verdict("fails", "prepare raises", _first_line(error))
    try:
        in_litert = _compare(program, model, prepared, runtime, compiled)
        _no_false_alarm(prepared.train(), program)
    except Failure as failure:
        return Verdict("fails", *failure.args)
    except Refused as refused:
        return Verdict("refused", *refused.args)
    except Unclear as unclear:
        return Verdict("unclear", *unclear.args)
    except Exception as error:  # in a run under noise, or in the fuzzer itself
        if "replace layers one by one" in str(error):  # a module was replaced whose parts the graph calls
            return Verdict("refused", "replaced", _first_line(error))
        return Verdict("fails", "checking raises", _first_line(error))
    return Verdict("agrees", litert=in_litert)


def checked(seed: int, runtime: bool = False, compiled: bool = False) -> tuple[Program, Verdict, int]:
    """The seed's first program that torch itself accepts, its verdict, and how many were discarded before."""
    for attempt in itertools.count():
        program = generate(seed, attempt)
        verdict = check(program, runtime, compiled)
        if verdict.kind != "discarded":
            return program, verdict, attempt
    raise AssertionError("unreachable")


def _float_step(program: Program, model: nn.Module) -> None:
    """Run a step of the float model; raises what torch raises."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        answer = pytree.tree_leaves(copy.deepcopy(model).eval()(*program.draw()))
    sizes = [float(y.abs().max()) for y in answer if isinstance(y, Tensor) and y.is_floating_point() and y.numel()]
    if any(0 < size < 1e-6 for size in sizes):
        raise ValueError("a result is rounding alone: the mean of what a norm centred")
    for changed in (False, True)[: 1 + bool(program.after)]:
        if changed:
            program.change(twin)
        try:
            Stepper(twin, program.draw, []).step(0, contextlib.nullcontext)
        except ValueError as error:
            if ONE_VALUE not in str(error):
                raise


def _compare(program: Program, model: nn.Module, prepared: nn.Module, runtime: bool, compiled: bool) -> bool:
    """Compare, and return whether LiteRT was among what was compared."""
    engine = fast(program.context)
    first = Stepper(prepared, program.draw, [])
    if program.after:
        _agree("training", lambda _: first.step(0, engine), lambda _: first.step(0, plain), None)
    try:
        seen = program.change(prepared)
    except Exception as error:
        raise Failure("change raises", _first_line(error)) from error
    stepper = Stepper(prepared, program.draw, seen)
    _fast_as_plain("training", stepper, engine)
    if compiled:
        _compiled(stepper, engine)
    with even_dropouts():
        _against_float(program, model, prepared)
    prepared.eval()
    _fast_as_plain("evaluation", stepper, engine, backward=False)
    watched = any("register" in line or ".forward = " in line for line in program.after)
    if isinstance(prepared, FusedGraph) and not watched:
        _converted(stepper, get_args(Execution))
    if not runtime or watched:
        return False
    given = tuple(x.detach() for x in program.draw())
    _against("ONNX Runtime", lambda: against_runtime(prepared, given))
    try:
        _against("LiteRT", lambda: against_litert(program.build(), given))
    except ValueError:
        return False
    return True


def _fast_as_plain(stage: str, stepper: Stepper, engine: Context, backward: bool = True) -> None:
    _agree(
        stage,
        lambda n: stepper.step(n, engine, backward),
        lambda n: stepper.step(n, plain, backward),
        lambda n, s: stepper.step(n, plain, backward, s),
    )


def _no_false_alarm(prepared: nn.Module, program: Program) -> None:
    """A model whose results agree also passes the engine's self-check."""
    if isinstance(prepared, FusedGraph):
        verdict = prepared._self_check(*program.draw())
        if verdict is not None and verdict.reason:
            raise Failure("the self-check raises an alarm", verdict.reason)


def _compiled(stepper: Stepper, engine: Context) -> None:
    """torch.compile draws other random numbers, so dropouts drop nothing."""
    torch._dynamo.reset()
    other = copy.copy(stepper)
    other.model = torch.compile(stepper.model)  # type: ignore[assignment]
    with even_dropouts():
        _agree(
            "compiled",
            lambda n: {name.replace("_orig_mod.", ""): value for name, value in other.step(n, engine).items()},
            lambda n: stepper.step(n, plain),
            lambda n, s: stepper.step(n, plain, seed=s),
        )


def _converted(stepper: Stepper, executions: Sequence[Any]) -> None:
    """`convert` in each execution against plain evaluation; what it refuses is in its own words."""
    for execution in executions:
        try:
            made = qat.convert(stepper.model, execution)
        except ValueError as error:
            if str(error).startswith("convert: "):
                return
            raise Failure(f"convert, {execution}, raises", _first_line(error)) from error
        other = Stepper(made, stepper.draw, [])
        _agree(
            f"convert, {execution},",
            lambda n, other=other: _outputs(other.step(n, contextlib.nullcontext, False)),
            lambda n: _outputs(stepper.step(n, plain, False)),
            lambda n, s: _outputs(stepper.step(n, plain, False, s)),
        )  # fmt: skip


def _outputs(results: Results) -> Results:
    return {name: value for name, value in results.items() if name.startswith("output")}


def _against(runtime: str, compare: Callable[[], str | None]) -> None:
    """Raise Failure if a runtime differs, Refused for what torch.onnx does not write, ValueError for LiteRT."""
    try:
        difference = compare()
    except Exception as error:
        if runtime == "LiteRT" and isinstance(error, ValueError):
            raise
        if "torch.onnx cannot export" in str(error) or "has no grid for its input" in str(error):
            raise Refused("export", _first_line(error)) from error
        raise Failure(f"{runtime} raises", _first_line(error)) from error
    if difference is not None:
        raise Failure(f"{runtime} differs", difference)


def _against_float(program: Program, model: nn.Module, prepared: nn.Module) -> None:
    """Without its quantizers the prepared model is the float one."""
    if any("register" in line or "forward" in line for line in program.after):
        return  # hooks see a prepared layer's tensors, as documented, not those of the float layer
    if any(program.modules.get(name, "").endswith("inplace=True)") and "inplace" not in line
           for line in program.after for name in re.findall(r"^model\.(m\d+) = ", line)):  # fmt: skip
        return  # `prepare` has read whether a module writes into its input
    if any(".size()" in line for line in program.lines) and re.search(r"stride|ceil|m\d+ = ", str(program.after)):
        return  # `prepare` has read the sizes behind a module
    if "InstanceNorm" in str(program.modules) and program.x.startswith("torch.randn(1,"):
        return  # of a channels-last gradient and a batch of one, torch's own backward is wrong
    passing, expected = without_quantizers(prepared), without_quantizers(model)  # the latter's own, if it has any
    program.change(expected)
    ours, theirs = Stepper(passing, program.draw, []), Stepper(expected, program.draw, [])
    names = {f"gradient of {name}" for name, _ in expected.named_parameters()}
    names |= {f"buffer {name}" for name, _ in expected.named_buffers() if "_quantizer." not in name}
    names |= {"gradient of input", "output 0", "output 1"}

    def step(stepper: Stepper, attempt: int, context: Context, backward: bool) -> Results:
        return {name: value for name, value in stepper.step(attempt, context, backward).items() if name in names}

    def near(attempt: int, seed: int, backward: bool) -> Results:
        twin = copy.deepcopy(expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.copy_(nudged(parameter))
        return Stepper(twin, program.draw, []).step(attempt, plain, backward, seed)

    for stage, backward in (("float training", True), ("float evaluation", False)):
        if not backward:
            passing.eval(), expected.eval()
        for name, context in ((stage, plain), (f"{stage}, fast", fast(program.context))):
            _agree(
                name,
                lambda n, c=context, b=backward: step(ours, n, c, b),
                lambda n, b=backward: step(theirs, n, plain, b),
                lambda n, s, b=backward: near(n, s, b),
            )


def _agree(
    stage: str, run: Callable[[int], Results], reference: Callable[[int], Results],
    noisy: Callable[[int, int], Results] | None,
) -> None:  # fmt: skip
    """Raise Failure if two ways to compute differ, Unclear if noise explains every difference."""
    differ, details = 0, ""
    for attempt in range(ATTEMPTS):
        expected, found = _tried(reference, attempt), _tried(run, attempt)
        if isinstance(expected, Exception) or isinstance(found, Exception):
            if isinstance(expected, Exception) and isinstance(found, Exception):
                return
            for error in (expected, found):
                if isinstance(error, (RuntimeError, ValueError)) and any(each in str(error) for each in SAID):
                    raise Refused(stage, _first_line(error))
            raise Failure(f"{stage} raises", _told(expected, found))
        if not differing(expected, found):
            return
        if noisy is None:
            continue
        beyond = beyond_noise(expected, found, [noisy(attempt, seed) for seed in range(NOISY_RUNS)])
        if beyond:
            differ += 1
            details = ", ".join(f"{name}: {gap:.1e}" for name, gap in sorted(beyond.items(), key=_order)[:4])
        if differ == NEEDED:
            raise Failure(f"{stage} differs", details)
    if noisy is not None:
        raise Unclear(stage, details)


def _order(item: tuple[str, float]) -> tuple[bool, float]:
    return not item[0].startswith("output"), -item[1]


def _tried(run: Callable[[int], Results], attempt: int) -> Results | Exception:
    try:
        return run(attempt)
    except Exception as error:
        return error


def _told(expected: Results | Exception, found: Results | Exception) -> str:
    who, error = ("it", found) if isinstance(found, Exception) else ("the reference", expected)
    assert isinstance(error, Exception)
    return f"only {who} raises {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
