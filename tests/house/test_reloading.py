"""Modules that are loaded anew, as notebooks do it: one after the other, and the whole library."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TRAINS = """
def trains(compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))
    x = torch.randn(4, 3, 9, 9)
    prepared = qat.prepare(model, example_inputs=x)
    qat.calibrate(prepared, [x])
    prepared.train()
    forward = torch.compile(prepared, backend="aot_eager") if compiled else prepared
    loss = forward(x).square().sum()
    loss.backward()
    return [loss.item(), *(float(p.grad.sum()) for p in prepared.parameters())]
"""
EVERY = """
import importlib, pkgutil, torch
from torch import nn
import qat
{TRAINS}
expected = trains(False)
names = [each.name for each in pkgutil.walk_packages(qat.__path__, "qat.") if "__main__" not in each.name]
first = ("qat.kernels.cpu.structures", "qat.kernels")  # classes before those who use them
for name in sorted(names, key=lambda name: [not name.startswith(each) for each in first]):
    if not name.startswith("qat.kernels") and "found" not in globals():
        found = trains(False)  # classes of layers and quantizers of two loads would not know each other
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4), (expected, found)
    importlib.reload(importlib.import_module(name))
print(len(names))
"""
ANEW = """
import sys, torch
from torch import nn
import qat
{TRAINS}
expected = trains(True)
old = qat.kernels.operators.norms.batch_statistics
for name in [name for name in sys.modules if name == "qat" or name.startswith("qat.")]:
    del sys.modules[name]
import qat
found = trains(True)
assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4), (expected, found)
assert old is not qat.kernels.operators.norms.batch_statistics
torch.compile(old, backend="aot_eager")(torch.randn(2, 3, 4, 4), 1e-5)  # who holds it can still use it
print("done")
"""


def ran(program: str) -> str:
    command = [sys.executable, "-c", program.replace("{TRAINS}", TRAINS)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip()


def test_every_module_can_be_loaded_anew() -> None:
    assert int(ran(EVERY)) > 100


def test_the_library_can_be_imported_anew() -> None:
    assert ran(ANEW) == "done"
