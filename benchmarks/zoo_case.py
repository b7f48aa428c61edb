"""One model of the zoo in a process of its own: built, prepared, trained, evaluated, copied, exported, run.

    python -m benchmarks.zoo_case resnet18 --threads 1 --row row.json

The row is written anew before and after every step, so that whoever stops this process knows which step it was in. A
step that fails is a row that says why; the steps that need it are left out.
"""

import argparse
import json
import math
import re
import resource
import subprocess
import tempfile
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qat
from benchmarks.speed_rows import facts_of_run
from benchmarks.work import Place, integer_work
from benchmarks.zoo_evaluation import copies, evaluation, refusals, result_of
from benchmarks.zoo_models import NAMES, Case, build, family_of
from benchmarks.zoo_runtime import Part, agreement, parts_of
from qat.atomic_write import atomic_write
from qat.inputs import Inputs
from qat.layers import QuantLayer
from qat.layers.twins import layers_of
from qat.preparation.parts import prepared_parts
from qat.preparation.report import LEFT_IN_FLOAT, WHOLE_MODEL, notes_of
from qat.quantizer import Quantizer

LEARNING_RATE = 1e-4
LARGEST_GRADIENT = 10.0
"""Norm to which gradients are clipped: fresh flow networks would diverge, to a NaN or not as the processor rounds."""
STEPS = 3
"""So that two of them start from what a step has changed: parameters, statistics, whatever a model keeps."""
LONGEST_REASON = 240
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Row:
    """What is known of one model, kept in a file from step to step."""

    def __init__(self, name: str, path: Path) -> None:
        family, git = family_of(name), ["git", "rev-parse", "--short", "HEAD"]
        about = facts_of_run(("torch", family if family in NAMES else "torchvision", "onnxruntime"))
        self.path = path
        self.facts: dict[str, Any] = {"name": name, "steps": {}, **about}
        commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True).stdout
        self.facts["commit"] = commit.strip()

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """A step whose facts go into the dict that it is given; an exception becomes its reason."""
        facts: dict[str, Any] = {}
        self.facts["running"] = name
        self.write()
        started = time.perf_counter()
        try:
            yield facts
            facts.setdefault("ok", True)
        except Exception as error:
            facts |= {"ok": False, "reason": reason(error)}
        facts["seconds"] = round(time.perf_counter() - started, 2)
        self.facts["steps"][name] = facts
        self.facts["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        del self.facts["running"]
        self.write()

    def passed(self, *steps: str) -> bool:
        """Whether all these steps went well."""
        return all(self.facts["steps"].get(step, {}).get("ok", False) for step in steps)

    def write(self) -> None:
        """Replace the file."""
        with atomic_write(self.path) as temporary:
            temporary.write_text(json.dumps(self.facts))


def measure(name: str, path: Path, exports: bool = True) -> dict[str, Any]:
    """All steps for one model, those of its files if wanted; returns the row."""
    row = Row(name, path)
    with row.step("build") as built:
        case = build(name)
        with torch.no_grad():  # a model may keep what it computed, and prepare takes none that holds gradients
            built |= {"refused": refusals(case.model, case.inputs), "result": result_of(case.model, case.inputs)}
        row.facts |= {"parameters": sum(p.numel() for p in case.model.parameters()), "inputs": case.shapes}
    if not row.passed("build"):
        return row.facts
    with row.step("prepare") as facts:
        model = qat.prepare(case.model, example_inputs=case.inputs)
        del case.model  # the largest ones do not fit memory twice
        facts["quantized_layers"] = sum(isinstance(module, QuantLayer) for module in model.modules())
        facts["whole"] = "" in prepared_parts(model)
    if not row.passed("prepare"):
        return row.facts
    with tempfile.TemporaryDirectory() as folder:
        with suppress(Exception):  # the step of copies says why
            torch.save(model, Path(folder) / "fresh.pt")
        _measure(row, case, model, Path(folder), exports)
    return row.facts


def _measure(row: Row, case: Case, model: nn.Module, folder: Path, exports: bool) -> None:
    """The steps of a prepared model, which lies in the folder as it is, not calibrated."""
    with row.step("work") as facts:
        facts |= work_facts(model, case.inputs)
    with row.step("calibrate"):
        qat.calibrate(model, [(case.inputs,)])
    if not row.passed("calibrate"):
        return
    with row.step("train") as facts:
        facts |= train(model, case)
    model.zero_grad(set_to_none=True)
    model.eval()
    with row.step("evaluate") as facts:
        facts["result"] = result_of(model, case.inputs)
        facts |= evaluation(model, case.inputs, row.facts["steps"]["build"]["refused"])
    with row.step("copy") as facts:
        facts |= copies(model, case.inputs, folder / "fresh.pt", row.facts["steps"]["build"]["refused"])
    if not exports:
        return
    files: list[tuple[Part, Path]] = []
    with row.step("export") as facts:
        export(model, case.inputs, folder, files, facts)
    if files:
        with row.step("runtime") as facts:
            facts |= agreement(files)


def work_facts(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The share of integer work, and the largest places in float with their reasons; first those without one."""
    work = integer_work(model, inputs)
    reasons = notes_of(model, LEFT_IN_FLOAT)
    layers = {name for name, _ in layers_of(model)}
    named = [(place, reason_for(place, reasons, layers)) for place in work.in_float]
    named.sort(key=lambda pair: (pair[1] is not None, -pair[0].macs))
    return {
        "macs": work.total,
        "share": work.share,
        "in_float": [[place.name, place.kind, place.macs, why] for place, why in named[:8]],
        "unexplained": sum(why is None for _, why in named),
    }


def reason_for(place: Place, reasons: dict[str, str], layers: Collection[str] = ()) -> str | None:
    """The reason that the model gives for this place or for a module around it.

    A product in Python code that could not be traced has the reason of the whole model; one of the `layers` needs one
    of its own.
    """
    parts = place.name.split(".")
    around = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    if place.name not in layers:
        around.append(WHOLE_MODEL)
    return next((reasons[name] for name in around if name in reasons), None)


def train(model: nn.Module, case: Case) -> dict[str, Any]:
    """Some steps of SGD; which parameters of quantizers had no gradient in one of them, or one that is not finite."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    untrained = tuple(f"{name}." for name in case.untrained)
    learned = {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if isinstance(module, Quantizer) and not path.startswith(untrained)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    missing, broken, losses = dict[str, None](), dict[str, None](), list[float]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = case.loss(model)
        loss.backward()
        losses.append(float(loss.detach()))
        missing |= dict.fromkeys(name for name, parameter in learned.items() if parameter.grad is None)
        broken |= _not_finite({name: parameter.grad for name, parameter in learned.items()})
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        optimizer.step()
    broken |= _not_finite(dict(model.named_parameters()))
    facts: dict[str, Any] = {"losses": losses, "without_gradient": list(missing), "not_finite": list(broken)}
    facts["ok"] = not missing and not broken and all(map(math.isfinite, losses))
    if not facts["ok"]:
        first = next(iter([*broken, *missing]), "the loss")
        facts["reason"] = (
            f"{len(missing)} of {len(learned)} quantizer parameters without a gradient,"
            f" {len(broken)} values not finite; first {first}"
        )
    return facts


def _not_finite(tensors: dict[str, Tensor | None]) -> dict[str, None]:
    """The names of those that hold infinity or NaN."""
    return dict.fromkeys(name for name, x in tensors.items() if x is not None and not x.isfinite().all())


def export(
    model: nn.Module, inputs: Inputs, folder: Path, files: list[tuple[Part, Path]], facts: dict[str, Any]
) -> None:
    """Export every part; `files` gets those that went well, the facts name the first that did not."""
    parts = parts_of(model, inputs)
    failed: list[str] = []
    for number, part in enumerate(parts):
        path = folder / f"{number}.onnx"
        try:
            qat.export_onnx(part.module, path, part.inputs)
            files.append((part, path))
        except Exception as error:
            failed.append(f"{part.name}: {reason(error)}" if part.name else reason(error))
    facts |= {"parts": len(parts), "ok": bool(parts) and not failed}
    if not facts["ok"]:
        facts["reason"] = failed[0] if failed else "no part of the model ran"


def reason(error: BaseException) -> str:
    """An exception in one line, without this machine's paths; what lies behind the ONNX exporter's own words."""
    while type(error).__module__.startswith("torch.onnx") and error.__cause__ is not None:
        error = error.__cause__
    text = COLOURS.sub("", str(error)).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}".replace(str(Path.cwd()), ".")[:LONGEST_REASON]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--row", type=Path, required=True)
    parser.add_argument("--without-export", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    measure(given.name, given.row, not given.without_export)


if __name__ == "__main__":
    main()
