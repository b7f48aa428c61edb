"""Everything that is known only on a GPU, in one command: within 8 minutes, on a bare machine with torch.

    python -m benchmarks.gpu --out FOLDER              # FOLDER/gpu.json and FOLDER/gpu.md
    python -m benchmarks.gpu --out FOLDER --emulate    # the same parts on the CPU, small and by formula: a rehearsal
    python -m benchmarks.gpu --out FOLDER --parts estimators steps

A part that fails is a row with its reason, and the next one runs; a part that takes too long ends at its limit. The
parts `run` and `ranks` start train.py, and need its packages (pydantic, onnx, onnxruntime, tensorboard).
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed_rows import Row, facts_of_run
from benchmarks.speed_step import Setting, TrainingStep, build_float
from benchmarks.speed_timing import Limits, contest, reason
from benchmarks.speed_variants import BUILDERS
from qat.kernels import kernels_by_formula

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("resnet18", "resnet50", "mobilenet_v2", "vit_b_16")
AMP = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = ((4096, 1024, 1024), (8192, 4096, 4096))
"""Rows, inputs and outputs of the matrix products."""


@dataclass(frozen=True)
class Bench:
    """The device, and whether it stands in for a GPU."""

    device: str = "cuda"
    emulated: bool = False

    @property
    def models(self) -> Iterable[str]:
        """What is checked and timed."""
        return ("squeezenet1_1",) if self.emulated else MODELS

    def setting(self, model: str) -> Setting:
        """Its batch: small in a rehearsal."""
        size = 48 if self.emulated else 224
        return Setting(model, 2 if self.emulated else 64, size, device=self.device)

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def estimators(bench: Bench) -> Iterator[Row]:
    """Every estimator on the device, its values and gradients, against its NumPy reference in float64."""
    from tests.estimator_matrix import all_cases
    from tests.references.estimator_proof import array, cotangent, gradients

    for case in all_cases():
        inputs = [each.to(bench.device) for each in case.inputs]
        incoming = cotangent(case.inputs[0].shape)
        numbers = [array(each) for each in case.inputs]
        pairs = [(case.function(*inputs), case.reference(*numbers))]
        found = gradients(case.function, inputs, torch.tensor(incoming, device=bench.device))
        pairs += zip(found, case.reference_gradient(incoming, *numbers), strict=True)
        worst = max((_difference(got, wanted) for got, wanted in pairs if wanted is not None), default=0.0)
        yield {"subject": case.name, "largest_difference": worst, "ok": worst < 1e-9}


def operators(bench: Bench) -> Iterator[Row]:
    """The operators' own tests, with every tensor on the device."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-k", "device", "tests/kernels"]
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "QAT_DEVICE": bench.device}
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")][:5]
    last = [*failed, *done.stdout.strip().splitlines()[-1:]]
    row: Row = {"subject": "tests/kernels", "ok": done.returncode == 0, "seconds": time.perf_counter() - started}
    yield row | {"note": " ".join(last)}


def self_check(bench: Bench) -> Iterator[Row]:
    """The step on codes against the plain one, as the model's own self-check judges it."""
    import qat

    for name in bench.models:
        setting = bench.setting(name)
        model = qat.prepare(build_float(setting), example_inputs=setting.images())
        qat.calibrate(model, [setting.images()])
        lines = qat.explain(model).splitlines()
        yield {"subject": name, "ok": any("on codes" in line for line in lines), "note": lines[0]}


def steps(bench: Bench) -> Iterator[Row]:
    """Seconds and peak memory of a training step, eager, compiled and in CUDA graphs, in each precision."""
    for name in bench.models:
        for amp, dtype in AMP.items():
            if bench.emulated and amp == "fp16":
                continue  # autocast to float16 is CUDA's
            yield from _steps(bench, bench.setting(name), amp, dtype)


def _steps(bench: Bench, setting: Setting, amp: str, dtype: torch.dtype | None) -> Iterator[Row]:
    """One model in one precision. Variants that share a compilation are compared in one contest."""
    modes: tuple[str, ...] = ("", "_compiled", "_graphs")
    if bench.emulated:
        modes = ("", "_compiled")[: 1 if dtype else 2]
    model, images = build_float(setting), setting.images()
    makers = {
        f"{kind}{mode}": _maker(kind, mode, model, images, dtype, bench.emulated)
        for kind in ("float", "qat")
        for mode in modes
    }
    found = contest(makers, "float", Limits(rounds=5 if bench.emulated else 15, seconds=10), bench.wait)
    for variant, timing in found.timings.items():
        peak = _peak(bench, makers[variant]) if bench.device == "cuda" else None
        about = {"subject": setting.model, "batch": setting.batch, "size": setting.size, "precision": amp}
        row = {**about, "variant": variant, "seconds": timing.seconds, "ratio": timing.ratio}
        yield row | {"compile_seconds": timing.warm_up, "peak_bytes": peak, "ok": True}
    for variant, why in found.missing.items():
        yield {"subject": setting.model, "precision": amp, "variant": variant, "ok": False, "note": why}


def _maker(
    kind: str, mode: str, model: Any, images: Tensor, dtype: torch.dtype | None, emulated: bool
) -> Callable[[], TrainingStep]:
    def make() -> TrainingStep:
        built = BUILDERS[kind](copy.deepcopy(model), images)
        if mode:
            torch._dynamo.reset()
            # Inductor takes minutes on a CPU; a rehearsal traces, and leaves it out.
            how = {"backend": "aot_eager"} if emulated else {"mode": "reduce-overhead" if mode == "_graphs" else None}
            built = torch.compile(built, **how)  # type: ignore[call-overload]
        return _Step(built, images, dtype)

    return make


class _Step(TrainingStep):
    """A step in another precision, with a gradient scaler in float16."""

    def __init__(self, model: Any, images: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(model, images)
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(images.device.type, enabled=dtype is torch.float16)

    def __call__(self) -> None:
        if self.images.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.autocast(self.images.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            loss = torch.nn.functional.cross_entropy(self.model(self.images).float(), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach().clone())  # a graph reuses the memory of its outputs


def _peak(bench: Bench, make: Callable[[], TrainingStep]) -> int:
    """The rise of the device's memory in one step."""
    step = make()
    step(), step()
    bench.wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    bench.wait()
    return torch.cuda.max_memory_allocated() - before


def products(bench: Bench) -> Iterator[Row]:
    """Exact int8 matrix products, and their time against float's."""
    from qat.kernels.formulas.products import try_int_mm
    from qat.torch_internals import int8_matmul

    device = torch.device(bench.device)
    yield {"subject": "int8 products are exact", "ok": try_int_mm(device)}
    for rows, inputs, outputs in ((64, 64, 64),) if bench.emulated else SIZES:
        a = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8, device=device)
        b = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
        floats = {dtype: (a.to(dtype), b.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
        makers = {str(dtype).removeprefix("torch."): _product(torch.matmul, *pair) for dtype, pair in floats.items()}
        makers["int8"] = _product(int8_matmul, a, b)
        found = contest(makers, "float32", Limits(rounds=15, seconds=5, repeats=10), bench.wait)
        for variant, timing in found.timings.items():
            row = {"subject": f"{rows} x {inputs} x {outputs}", "variant": variant, "ok": True}
            yield row | {"seconds": timing.seconds, "ratio": timing.ratio}


def _product(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Callable[[], Callable[[], Any]]:
    return lambda: lambda: multiply(a, b.T)


def run(bench: Bench) -> Iterator[Row]:
    """One epoch of the default config on the device, its export and its proof."""
    yield _trained(bench, "one process", [sys.executable, "train.py"])


def ranks(bench: Bench) -> Iterator[Row]:
    """The same under torchrun, one rank, by NCCL (by Gloo in a rehearsal)."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "train.py"]
    yield _trained(bench, "torchrun, 1 rank", launcher)


def _trained(bench: Bench, subject: str, command: list[str]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        small = ["data.limit_train=64", "data.limit_val=32", "model.name=squeezenet1_1", "data.image_size=48"]
        changes = [f"device={bench.device}", f"run_dir={folder}/run", "float.epochs=1", "qat.epochs=1"]
        changes += small if bench.emulated else []
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--config", "resnet_int8.yaml", *changes], cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        row: Row = {"subject": subject, "ok": done.returncode == 0, "seconds": time.perf_counter() - started}
        summary = Path(folder) / "run" / "summary.json"
        if summary.exists():
            found = json.loads(summary.read_text())
            row |= {"top1": found["qat"]["top1"], "agreement": found["onnx"]["agreement"]}
        return row | ({} if row["ok"] else {"note": done.stderr.strip()[-300:]})


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "estimators": estimators,
    "operators": operators,
    "self_check": self_check,
    "products": products,
    "run": run,
    "ranks": ranks,
    "steps": steps,
}
"""In the order in which they run: what is right before what is fast."""


def measured(bench: Bench, parts: Iterable[str]) -> list[Row]:
    """The rows of all parts; what a part raises is one of its rows."""
    rows: list[Row] = []
    for part in parts:
        started = time.perf_counter()
        try:
            for row in PARTS[part](bench):
                rows.append({"part": part, **row})
        except Exception as error:
            rows.append({"part": part, "ok": False, "note": reason(error)})
        failed = sum(not row["ok"] for row in rows if row["part"] == part)
        print(f"{part}: {failed} failed, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return rows


def table(rows: list[Row], about: Row) -> str:
    """The report: a line for each row that says more than that all is well."""
    lines = [f"On {about['machine'].get('gpu', about['machine']['processor'])}, {about['versions']}, {about['date']}."]
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        right = sum(row["ok"] for row in own)
        lines += ["", f"## {part}: {right} of {len(own)}", ""]
        shown = [row for row in own if not row["ok"] or row.keys() & {"seconds", "note"}]
        if shown:
            keys = [key for key in dict.fromkeys(key for row in shown for key in row) if key != "part"]
            lines += [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
            lines += [f"| {' | '.join(_cell(row.get(key)) for key in keys)} |" for row in shown]
    return "\n".join([*lines, ""])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())


def _difference(got: Tensor | None, wanted: Any) -> float:
    """The largest one, relative to 1 and more; infinite if there is nothing, or NaN in one of both."""
    if got is None:
        return float("inf")
    found = got.detach().cpu().double()
    expected = torch.as_tensor(wanted, dtype=torch.float64).expand(found.shape)
    gap = torch.where(found == expected, 0.0, (found - expected).abs() / expected.abs().clamp(min=1))
    return float(gap.nan_to_num(float("inf")).max()) if gap.numel() else 0.0


def main(arguments: list[str] | None = None) -> int:
    """Measure, write both files, and say whether a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--emulate", action="store_true", help="on the CPU, small")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    bench = Bench("cpu", emulated=True) if given.emulate else Bench()
    if bench.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --emulate rehearses on the CPU")
    about = facts_of_run()
    if given.emulate:
        with kernels_by_formula():
            rows = measured(bench, given.parts)
    else:
        rows = measured(bench, given.parts)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.json").write_text(
        json.dumps({**about, "emulated": bench.emulated, "rows": rows}, indent=1) + "\n"
    )
    text = table(rows, about)
    (given.out / "gpu.md").write_text(text)
    print(text)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
