"""The cases of the speed benchmark: each measures comparisons and returns their rows."""

import multiprocessing
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed_alone import alone
from benchmarks.speed_memory import held_bytes, peak_growth, step_saved_bytes
from benchmarks.speed_operators import OPERATORS, SHAPES, operand
from benchmarks.speed_rows import Row, missing_rows, timing_rows
from benchmarks.speed_step import SIZES, Setting, build_float, build_step, step_makers
from benchmarks.speed_timing import Limits, compared, contest, reason
from benchmarks.speed_variants import BUILDERS

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "vit_b_16")
BATCHES = {"resnet18": (16, 32)}
GPU_BATCH, GPU_SIZE = 128, 224
SCALING_BATCHES = (1, 4, 16, 32)
SCALING_MODELS = ("resnet34", "wide_resnet50_2")
FREED_STAYS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 28)}
"""Memory that is freed stays with the process. Else it is luck whether the next tensor's pages come from the system, at
three times what a kernel takes to write them; that says nothing about the kernel."""
COLD_ROUNDS = 3
"""A fresh process compiles from nothing; its time varies little next to what it takes."""


@dataclass(frozen=True)
class Plan:
    """What the command line asks for.

    Attributes:
        models: names in torchvision.
        batches: instead of those of `BATCHES`, 16 for the others.
        size: of the images, instead of 112 and `SIZES`.
        layout: memory format.
        threads: of torch, for processes of their own.
        limits: how long.
        without: variants that are left out.
    """

    models: Sequence[str] = MODELS
    batches: Sequence[int] | None = None
    size: int | None = None
    layout: str = "channels_last"
    threads: int = 2
    limits: Limits = field(default_factory=Limits)
    without: Sequence[str] = ()

    def settings(self, models: Sequence[str] | None = None, batches: Sequence[int] | None = None) -> Iterator[Setting]:
        """What is trained on the CPU."""
        for model in models or self.models:
            for batch in batches or self.batches or BATCHES.get(model, (16,)):
                yield Setting(model, batch, self.size or SIZES.get(model, 112), self.layout)

    def among(self, variants: Sequence[str]) -> list[str]:
        """Those that are not left out."""
        return [variant for variant in variants if variant not in self.without]


def wait_for(device: str) -> Callable[[], object]:
    """What waits until the device is idle."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def op(plan: Plan, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Iterator[list[Row]]:
    """Fake quantization of one tensor, forward and backward, against relu; in a process that keeps its memory."""
    for kind, shape in shapes.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            os.environ.update(FREED_STAYS)  # the new process reads it when it starts
            try:
                waiting = pool.submit(op_rows, kind, shape, plan)
            finally:
                for variable in FREED_STAYS:
                    del os.environ[variable]
            yield waiting.result()


def op_rows(kind: str, shape: tuple[int, ...], plan: Plan) -> list[Row]:
    """One comparison of operators, in this process."""
    warnings.simplefilter("ignore")  # the peers' deprecations
    torch.set_num_threads(plan.threads)
    given = operand(kind, shape, plan.layout)
    makers = {name: _bind(OPERATORS[name], given) for name in plan.among(list(OPERATORS))}
    about = {"subject": kind, "size": list(shape), "layout": plan.layout, "device": "cpu", "amp": "none"}
    return timing_rows("op", about, "relu", contest(makers, "relu", replace(plan.limits, repeats=3)))


def step(plan: Plan) -> Iterator[list[Row]]:
    """Whole training steps of this project and its peers."""
    for setting in plan.settings():
        yield step_rows("step", setting, plan.among(list(BUILDERS)), "float", plan.limits)


def compiled(plan: Plan) -> Iterator[list[Row]]:
    """The same under torch.compile, fullgraph, against the compiled float model."""
    for setting in plan.settings():
        yield step_rows("compiled", setting, ["float_compiled", "qat_compiled", "float"], "float_compiled", plan.limits)


def scaling(plan: Plan) -> Iterator[list[Row]]:
    """How the ratio depends on the batch, and on depth and width."""
    for setting in (
        *plan.settings(["resnet18"], plan.batches or SCALING_BATCHES),
        *plan.settings(SCALING_MODELS, plan.batches or (16,)),
    ):
        yield step_rows("scaling", setting, ["float", "qat"], "float", plan.limits)


def step_rows(case: str, setting: Setting, variants: Sequence[str], base: str, limits: Limits) -> list[Row]:
    """One comparison of training steps."""
    torch._dynamo.reset()  # as in a process that trains this model only
    found = contest(step_makers(setting, variants), base, limits, wait_for(setting.device))
    return timing_rows(case, setting.facts(), base, found)


def memory(plan: Plan) -> Iterator[list[Row]]:
    """Bytes that are kept for the backward, and the rise of a step's memory in a process of its own."""
    for setting in plan.settings():
        variants = plan.among([*BUILDERS, "float_compiled", "qat_compiled"])
        yield memory_rows(setting, variants, lambda variant, setting=setting: _peak_alone(variant, setting, plan))


def memory_rows(
    setting: Setting, variants: Sequence[str], peak: Callable[[str], int | None] | None = None
) -> list[Row]:
    """One comparison of memory. `peak` measures the rise for a variant; without, it is measured here, after a step."""
    torch._dynamo.reset()
    model, images = build_float(setting), setting.images()
    bytes_of: dict[str, tuple[int, int, int | None]] = {}
    missing: dict[str, str] = {}
    for variant in variants:
        try:
            training = build_step(variant, model, images, setting.amp)
            training()
            training()  # compiled by now, and the optimizer has its momentum
            saved = step_saved_bytes(training)
            held = held_bytes(training.loss, setting.device)
            bytes_of[variant] = (saved, held, peak(variant) if peak else peak_growth(training, setting.device))
        except Exception as error:
            if variant == "float":
                raise
            missing[variant] = reason(error)
    saved_by_float, _, peak_of_float = bytes_of["float"]
    rows = [
        {
            "case": "memory",
            **setting.facts(),
            "variant": variant,
            "base": "float",
            "saved_bytes": saved,
            "held_bytes": held,
            "ratio": saved / saved_by_float,
            "peak_bytes": rise,
            "peak_ratio": rise / peak_of_float if rise is not None and peak_of_float else None,
        }
        for variant, (saved, held, rise) in bytes_of.items()
    ]
    return rows + missing_rows("memory", setting.facts(), "float", missing)


def cold(plan: Plan) -> Iterator[list[Row]]:
    """The first step of a fresh process with empty caches, and of the next one, which finds them filled."""
    for setting in plan.settings(batches=plan.batches or (16,)):
        yield cold_rows(setting, min(plan.limits.rounds, COLD_ROUNDS), plan.threads)


def cold_rows(setting: Setting, rounds: int, threads: int) -> list[Row]:
    """One comparison of first steps; every round starts with empty caches."""
    facts: dict[str, list[dict[str, Any]]] = {"float": [], "qat": [], "qat_kept": []}
    missing: dict[str, str] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as caches:
            for variant in [variant for variant in facts if variant not in missing]:
                try:
                    found = alone(variant.removesuffix("_kept"), setting, threads, Path(caches))
                except Exception as error:
                    if variant == "float":
                        raise
                    missing[variant] = reason(error)
                else:
                    facts[variant].append(found)
    rows = [cold_row(setting, name, found, facts["float"]) for name, found in facts.items() if name not in missing]
    return rows + missing_rows("cold", setting.facts(), "float", missing)


def cold_row(setting: Setting, variant: str, found: list[dict[str, Any]], base: list[dict[str, Any]]) -> Row:
    """Medians over the rounds; differences are to float in the same round, with and without what leads to the step."""
    first, other = [row["first_step"] for row in found], [row["first_step"] for row in base]
    ready = [row["preparation"] for row in found], [row["preparation"] for row in base]
    return {
        "case": "cold",
        **setting.facts(),
        "variant": variant,
        "base": "float",
        **asdict(compared(first, other)),
        "difference": statistics.median(own - its for own, its in zip(first, other, strict=True)),
        "difference_prepared": statistics.median(
            a + b - c - d for a, b, c, d in zip(ready[0], first, ready[1], other, strict=True)
        ),
        "preparation": statistics.median(row["preparation"] for row in found),
        "later_step": statistics.median(row["later_step"] for row in found),
    }


def _peak_alone(variant: str, setting: Setting, plan: Plan) -> int | None:
    rise = alone(variant, setting, plan.threads, memory=True)["peak_growth"]
    return None if rise is None else int(rise)


def _bind(make: Callable[[Any], Any], given: Any) -> Callable[[], Any]:
    return lambda: make(given)


CASES: dict[str, Callable[[Plan], Iterator[list[Row]]]] = {
    "op": op,
    "step": step,
    "memory": memory,
    "cold": cold,
    "compiled": compiled,
    "scaling": scaling,
}
