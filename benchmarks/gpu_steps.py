"""Seconds and memory of a training step on a GPU: eager and in CUDA graphs, in each precision.

Float and quantized are compared in the same mode and precision, the most telling model first: what the time limit cuts
off is the least of it.
"""

import copy
import functools
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_parts import Bench
from benchmarks.kept import RESULTS, table
from benchmarks.speed_cases import BUILDERS, TrainingStep
from benchmarks.speed_rows import Row
from benchmarks.speed_timing import Limits, contest, reason

PRECISIONS = {"bf16": torch.bfloat16, "float32": None, "fp16": torch.float16}
MODES = ("eager", "graphs")

WARM_UP = 3
"""Steps before the first that counts."""


class Step(TrainingStep):
    """A step in one precision, with a gradient scaler in float16, that says what building and memory cost."""

    def __init__(self, model: nn.Module, images: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(model, images)
        self.labels %= 10  # the model of a rehearsal has so many
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(images.device.type, enabled=dtype is torch.float16)
        self.facts: Row = {}

    def __call__(self) -> None:
        with precision_of(self.images, self.dtype):
            loss = F.cross_entropy(self.model(self.images).float(), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach().clone())  # a graph reuses the memory of its outputs


def precision_of(images: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """The context of a forward; graphs cannot be recorded with the cache."""
    return torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def steps(bench: Bench) -> Iterator[Row]:
    """Every mode, model and precision, in the order of what is most worth knowing."""

    @functools.cache
    def pair(name: str) -> tuple[dict[str, nn.Module], Tensor]:
        setting = bench.setting(name)
        images, model = setting.images(), bench.built(setting)
        return {kind: BUILDERS[kind](copy.deepcopy(model), images) for kind in ("float", "qat")}, images

    modes = MODES[:1] if bench.emulated else MODES
    for precision, name, mode in itertools.product(PRECISIONS, bench.models, modes):
        about = {"subject": name, "mode": mode, "precision": precision}
        try:
            for row in _compared(bench, *pair(name), mode, PRECISIONS[precision]):
                yield about | row
        except Exception as error:  # float fails too; the other modes may not
            yield about | {"ok": False, "note": reason(error)}


def _compared(
    bench: Bench, models: dict[str, nn.Module], images: Tensor, mode: str, dtype: torch.dtype | None
) -> Iterator[Row]:
    """Float and quantized in one mode and precision."""
    built: dict[str, Step] = {}

    def maker(kind: str) -> Callable[[], Step]:
        def make() -> Step:
            built[kind] = _built(bench, models[kind], images, mode, dtype)
            return built[kind]

        return make

    limits = Limits(rounds=1 if bench.emulated else 15, seconds=4, warm_up=0)
    found = contest({kind: maker(kind) for kind in models}, "float", limits, bench.wait)
    for kind, timing in found.timings.items():
        row = {"batch": len(images), "size": images.shape[-1], "variant": kind, "ok": True}
        yield row | {"seconds": timing.seconds, "ratio": timing.ratio, **built[kind].facts}
    for kind, why in found.missing.items():
        yield {"variant": kind, "ok": False, "note": why}


def _built(bench: Bench, model: nn.Module, images: Tensor, mode: str, dtype: torch.dtype | None) -> Step:
    """A step that is warm. Its memory: the rise in one step, and all that it holds, the pools of graphs included."""
    if bench.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
    started = time.perf_counter()
    own = copy.deepcopy(model)
    if mode == "graphs":
        with precision_of(images, dtype):
            torch.cuda.make_graphed_callables(own, (images.clone(),), allow_unused_input=True)
    step = Step(own, images, dtype)
    for _ in range(1 if bench.emulated else WARM_UP):
        step()
    bench.wait()
    step.facts["warm_up_seconds"] = time.perf_counter() - started
    if bench.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        bench.wait()
        rise = torch.cuda.max_memory_allocated() - before
        step.facts |= {"peak_bytes": rise, "reserved_bytes": torch.cuda.memory_reserved() - held}
    return step


def gpu_table(results: Path = RESULTS / "gpu.json") -> str:
    """A line a model and precision: a step of float and of the quantized model, as they are and in CUDA graphs."""
    about = json.loads(results.read_text())
    steps = [row for row in about["rows"] if row["part"] == "steps" and row["ok"]]
    kinds = [(mode, variant) for mode in MODES for variant in ("float", "qat")]
    lines = []
    for subject in dict.fromkeys((row["subject"], row["precision"], row["batch"]) for row in steps):
        own: dict[tuple[str, str], Row] = {
            (row["mode"], row["variant"]): row
            for row in steps
            if (row["subject"], row["precision"], row["batch"]) == subject
        }
        if own.keys() == set(kinds):
            ratio, peak = (
                own[mode, "qat"][key] / own[mode, "float"][key]
                for mode, key in (("graphs", "seconds"), ("eager", "peak_bytes"))
            )
            cells = [f"{own[kind]['seconds'] * 1e3:.1f} ms" for kind in kinds]
            lines.append([f"{subject[0]}, {subject[1]}, batch {subject[2]}", *cells, f"{ratio:.2f}", f"{peak:.2f}"])
    titles = ["", *(f"{variant}, {mode}" for mode, variant in kinds), "qat / float, graphs", "memory"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    said = f"*memory*: the rise of an eager step, as a share of float's. {about['machine']['gpu']}; {versions}."
    return f"{table(titles, lines, 1)}\n{said}\n"
