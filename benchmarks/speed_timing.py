"""Interleaved measuring: every round runs every variant once, and a ratio is one of the same round.

A shared machine is now fast and now slow. Two variants of one round see the same machine, so the median over rounds of
their ratio moves much less than the ratio of their medians.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[], Any]

LONGEST_REASON = 200


@dataclass(frozen=True)
class Limits:
    """How long to measure."""

    rounds: int = 15  # at most
    seconds: float = 300.0  # after which no round starts, once there are three
    warm_up: int = 2  # calls of every variant before the first round
    repeats: int = 1  # calls in a row that count as one measurement


@dataclass(frozen=True)
class Timing:
    """One variant against the base: seconds of a call, medians over the rounds, and the extremes of the ratio."""

    seconds: float
    ratio: float
    low: float
    high: float
    rounds: int


@dataclass
class Contest:
    """What came out: a timing for every variant that ran, a reason for every one that did not."""

    timings: dict[str, Timing] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def contest(
    makers: Mapping[str, Callable[[], Call]], base: str, limits: Limits, wait: Callable[[], object] = lambda: None
) -> Contest:
    """Build the variants, warm them up, and measure them in turns, as ratios to the base, which must run.

    Another one that raises when it is built or first called is missing, with the reason. A call may have a `problem()`
    that says after the last round what is wrong with its results.
    """
    result = Contest()
    calls: dict[str, Call] = {}
    for name, maker in makers.items():
        try:
            call = maker()
            for _ in range(limits.warm_up):
                call()
            wait()
        except Exception as error:
            if name == base:
                raise
            result.missing[name] = reason(error)
        else:
            calls[name] = call
    seconds = interleaved(calls, limits, wait)
    for name, call in calls.items():
        problem = getattr(call, "problem", lambda: None)()
        if problem is None:
            result.timings[name] = compared(seconds[name], seconds[base])
        elif name == base:
            raise ArithmeticError(f"{base}: {problem}")
        else:
            result.missing[name] = problem
    return result


def interleaved(calls: Mapping[str, Call], limits: Limits, wait: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of one call, a list over rounds for every variant."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()  # else one variant pays for the garbage of the others
    gc.freeze()  # what is there already need not be looked through after every round
    began = time.perf_counter()
    try:
        for number in range(limits.rounds):
            if number >= 3 and time.perf_counter() - began > limits.seconds:
                break
            for name in order(list(calls), number):
                wait()
                started = time.perf_counter()
                for _ in range(limits.repeats):
                    calls[name]()
                wait()
                seconds[name].append((time.perf_counter() - started) / limits.repeats)
            gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    return seconds


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: rotated by one each time, and backwards after every variant has been first.

    So no variant always stands first, nor always behind the same one, whose cache contents it would inherit.
    """
    turns, start = divmod(number, len(names))
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if turns % 2 else rotated


def compared(seconds: Sequence[float], base: Sequence[float]) -> Timing:
    """The medians, and the extremes of the ratio. Both sequences hold the same rounds."""
    ratios = [own / other for own, other in zip(seconds, base, strict=True)]
    return Timing(statistics.median(seconds), statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def reason(error: BaseException) -> str:
    """Why a variant is missing, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {lines[0]}"
    return f"fails: {type(error).__name__}: {lines[0]}"[:LONGEST_REASON]
