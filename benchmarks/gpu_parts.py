"""What `python -m benchmarks.gpu` asks of a device before it times anything: is it right there, and does it train?

A part yields rows. What is imported inside a part is what a bare machine may lack: then that part fails, and no other.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed_cases import BUILDERS, Setting, build_float
from benchmarks.speed_rows import Row
from benchmarks.speed_timing import reason

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("resnet50", "mobilenet_v2", "vit_b_16", "resnet18")


class Tiny(nn.Module):
    """Stands in for every model of a rehearsal: a residual block and a linear layer."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.fc((x + self.conv(x)).relu().mean((2, 3)))


@dataclass(frozen=True)
class Bench:
    """The device, and whether it stands in for a GPU."""

    device: str = "cuda"
    emulated: bool = False

    @property
    def models(self) -> Iterable[str]:
        """What is checked and timed, the most telling first."""
        return ("tiny",) if self.emulated else MODELS

    def setting(self, model: str) -> Setting:
        """Its batch: small in a rehearsal."""
        return Setting(model, 4 if self.emulated else 64, 16 if self.emulated else 224, device=self.device)

    def built(self, setting: Setting) -> nn.Module:
        """The float model on the device."""
        return Tiny().to(self.device) if self.emulated else build_float(setting)

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def estimators(bench: Bench) -> Iterator[Row]:
    """Every estimator on the device, its values and gradients, against its NumPy reference in float64."""
    from tests.estimator_matrix import all_cases
    from tests.references.estimator_proof import varied

    for case in all_cases():
        try:
            worst = max(_off_by(case, inputs, bench.device) for inputs in varied(case))
        except Exception as error:
            yield {"subject": case.name, "ok": False, "note": reason(error)}
        else:
            yield {"subject": case.name, "largest_difference": worst, "ok": worst < 1e-9}


def _off_by(case: Any, inputs: tuple[Tensor, ...], device: str) -> float:
    """The largest difference of the value and of each gradient."""
    from tests.references.estimator_proof import array, cotangent, gradients

    incoming, numbers = cotangent(inputs[0].shape), [array(each) for each in inputs]
    there = [each.to(device) for each in inputs]
    found = case.function(*there)
    if case.name == "stochastic_round_ste" and device != "cpu":  # its reference has the CPU's noise
        off = 0.0 if (found - there[0]).abs().max() < 1 and bool((found == found.round()).all()) else float("inf")
    else:
        off = difference(found, case.reference(*numbers))
    given = gradients(case.function, there, torch.tensor(incoming, device=device))
    for got, wanted in zip(given, case.reference_gradient(incoming, *numbers), strict=True):
        if got is not None or wanted is not None:  # a rule that gives no gradient may return zeros, and the reverse
            off = max(off, difference(torch.zeros(()) if got is None else got, 0.0 if wanted is None else wanted))
    return off


def difference(got: Tensor, wanted: Any) -> float:
    """The largest one, relative to 1 and more; infinite if there is NaN in one of both."""
    found = got.detach().cpu().double()
    found, expected = torch.broadcast_tensors(found, torch.as_tensor(wanted, dtype=torch.float64))
    gap = torch.where(found == expected, 0.0, (found - expected).abs() / expected.abs().clamp(min=1))
    return float(gap.nan_to_num(float("inf")).max()) if gap.numel() else 0.0


def run(bench: Bench) -> Iterator[Row]:
    """One epoch of the default config on the device, its export and its proof."""
    yield from _trained(bench, "one process")


def ranks(bench: Bench) -> Iterator[Row]:
    """DDP of one rank, by NCCL (by Gloo in a rehearsal): a loop of one's own, then train.py under torchrun."""
    import torch.distributed as dist

    import qat

    setting = bench.setting(next(iter(bench.models)))
    model = BUILDERS["qat"](bench.built(setting), setting.images())
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if bench.emulated else "nccl"
        dist.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
        try:
            norms = qat.sync_batch_norm(model)
            wrapped = nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=1e-3, weight_decay=1e-4))
            for _ in range(2):
                loss = wrapped(setting.images()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            yield {"subject": f"DDP, {norms} BatchNorms in step", "ok": bool(loss.isfinite())}
        finally:
            dist.destroy_process_group()
    yield from _trained(bench, "torchrun, 1 rank", "data.limit_train=256", torchrun=True)


def _trained(bench: Bench, subject: str, *more: str, torchrun: bool = False) -> Iterator[Row]:
    """train.py in this process, or in one of torchrun's."""
    tiny = ("data.limit_train=64", "data.limit_val=32", "model.name=benchmarks.gpu_parts:Tiny")
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"device={bench.device}", f"run_dir={folder}/run", "float.epochs=1", "qat.epochs=1", *more]
        given = ["--config", "resnet_int8.yaml", *changes, *(tiny if bench.emulated else ())]
        started = time.perf_counter()
        os.chdir(ROOT)
        status = _torchrun(given) if torchrun else _train(given)
        row: Row = {"subject": subject, "ok": status == 0, "seconds": time.perf_counter() - started}
        summary = Path(folder) / "run" / "summary.json"
        if summary.exists():
            found = json.loads(summary.read_text())
            row |= {"top1": found["qat"]["top1"], "agreement": found["onnx"]["agreement"]}
            row |= {"note": found["problem"]} if found["problem"] else {}
        yield row


def _train(given: list[str]) -> int:
    from qat.training.script import main

    return main(given)


def _torchrun(given: list[str]) -> int:
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node", "1", "train.py", *given])  # raises if a rank fails
    return 0
