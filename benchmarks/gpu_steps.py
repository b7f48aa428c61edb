"""Seconds and memory of a training step on a GPU: eager, compiled and in CUDA graphs, in each precision.

Float and quantized are compared in the same mode and precision. Compiling takes most of the time, so what runs eagerly
comes first, and of the rest the most telling model: what the time limit cuts off is the least of it.
"""

import copy
import functools
import gc
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_parts import Bench
from benchmarks.speed_rows import Row
from benchmarks.speed_step import TrainingStep
from benchmarks.speed_timing import Limits, contest, reason
from benchmarks.speed_variants import BUILDERS

PRECISIONS = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MODES = ("eager", "compiled", "graphs")
REHEARSED = (*(("eager", precision) for precision in PRECISIONS), ("compiled", "float32"), ("graphs", "bf16"))
"""Tracing takes seconds, so that a rehearsal has not every mode in every precision."""

WARM_UP = 3
"""Steps before the first that counts: one compiles, one records the graphs, one replays them."""


class Step(TrainingStep):
    """A step in one precision, with a gradient scaler in float16, that says what building and memory cost."""

    def __init__(self, model: nn.Module, images: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(model, images)
        self.labels %= 10  # the model of a rehearsal has so many
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(images.device.type, enabled=dtype is torch.float16)
        self.facts: Row = {}

    def __call__(self) -> None:
        if self.images.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.autocast(self.images.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            loss = F.cross_entropy(self.model(self.images).float(), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach().clone())  # a graph reuses the memory of its outputs


def steps(bench: Bench) -> Iterator[Row]:
    """Every mode, model and precision, in the order of what is most worth knowing."""

    @functools.cache
    def pair(name: str) -> tuple[dict[str, nn.Module], Tensor]:
        setting = bench.setting(name)
        images, model = setting.images(), bench.built(setting)
        return {kind: BUILDERS[kind](copy.deepcopy(model), images) for kind in ("float", "qat")}, images

    for modes in (MODES[:1], MODES[1:]):
        for name in bench.models:
            for precision in PRECISIONS:
                for mode in modes:
                    if bench.emulated and (mode, precision) not in REHEARSED:
                        continue
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
    torch._dynamo.reset()
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
    compiled = copy.deepcopy(model)
    if mode != "eager":
        # Inductor takes minutes on a CPU; a rehearsal traces, and leaves it out.
        how = {"backend": "aot_eager"} if bench.emulated else {"mode": "reduce-overhead" if mode == "graphs" else None}
        compiled = torch.compile(compiled, **how)  # type: ignore[call-overload]
    step = Step(compiled, images, dtype)
    started = time.perf_counter()
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
