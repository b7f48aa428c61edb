"""The fuzzer finds and shrinks a planted error and repeats itself; on its programs all ways to compute agree."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from qat.codes.training import activations
from qat.kernels import plain_formulas
from tests.fuzz.__main__ import main, report
from tests.fuzz.agreement import beyond_noise, differing
from tests.fuzz.cases import case
from tests.fuzz.checking import check, checked
from tests.fuzz.generation import generate
from tests.fuzz.shrinking import shrink
from tests.fuzz.steps import Stepper

TENS = range(0, 200, 10)

CLIPPED = case(
    "torch.randn(4, 3, 6, 6)", "nn.Conv2d(3, 4, 3); nn.Conv2d(4, 4, 1); nn.Linear(4, 2)",
    "v1 = m0(v0); v2 = v1 * 8; v3 = F.relu6(v2); v4 = m1(v3); v5 = v4.mean((2, 3)); v6 = m2(v5)",
)  # fmt: skip


@pytest.mark.parametrize("first", [each if each < 40 else pytest.param(each, marks=pytest.mark.slow) for each in TENS])
def test_all_ways_agree(first: int) -> None:
    """Every 25th program is exported too."""
    reports = []
    for seed in range(first, first + 10):
        runtime = seed % 25 == 0
        program, verdict, _ = checked(seed, runtime)
        if verdict.kind == "fails":
            found = report(program, verdict, runtime, compiled=False, shrinks=True)
            reports.append(f"{found['script']}\n# {found['stage']}: {found['detail']}")
    assert not reports, "\n\n".join(reports)


def test_a_wrong_bound_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(CLIPPED).kind == "agrees"
    wrong = [replace(row, bounds=(0.0, 5.5)) if F.relu6 in row.functions else row for row in activations.TABLE]
    monkeypatch.setattr(activations, "TABLE", tuple(wrong))
    verdict = check(CLIPPED)
    assert (verdict.kind, verdict.stage) == ("fails", "training differs")
    small = shrink(CLIPPED, lambda program: check(program).is_like(verdict))
    assert len(small.lines) < len(CLIPPED.lines) and "F.relu6" in small.script()
    assert check(small).is_like(verdict)


def test_a_seed_always_gives_the_same_program() -> None:
    first, again = ([generate(seed) for seed in range(30)] for _ in range(2))
    assert first == again
    assert len({program.script() for program in first}) == 30


def test_a_script_runs_as_it_is_printed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CLIPPED.script())
    left = runpy.run_path(str(script))
    assert left["found"].shape == (4, 2) and type(left["model"]).__name__ == "Model"


def test_the_command_keeps_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    status = main(["--cases", "2", "--seed", "3", "--runtime-every", "0", "--out", str(tmp_path / "fuzz.json")])
    torch.set_num_threads(threads)
    kept = json.loads((tmp_path / "fuzz.json").read_text())
    assert kept["cases"] == 2 and kept["first_seed"] == 3
    assert sum(kept["counts"][kind] for kind in ("agrees", "fails", "refused", "unclear")) == 2
    assert status == int(kept["counts"]["fails"] > 0)
    assert '"cases": 2' in capsys.readouterr().out


def test_noise_explains_a_rounding_but_no_larger_difference() -> None:
    reference = {"output 0": torch.tensor([1.0, 2.0, 3.0])}
    rounded = {"output 0": torch.tensor([1.0, 2.0, 3.01])}
    other = {"output 0": torch.tensor([1.0, 2.0, 3.5])}
    assert differing(reference, rounded).keys() == {"output 0"}
    assert not beyond_noise(reference, rounded, [reference, rounded])
    assert beyond_noise(reference, rounded, [reference]).keys() == {"output 0"}
    assert beyond_noise(reference, other, [reference, rounded]).keys() == {"output 0"}
    assert beyond_noise(reference, {}, [rounded]).keys() == {"output 0"}


def test_a_step_leaves_the_model_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    results = Stepper(model, lambda attempt: (torch.randn(4, 2),), []).step(0, plain_formulas)
    assert not torch.equal(results["buffer 1.running_mean"], before["1.running_mean"])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
