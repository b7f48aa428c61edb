"""The speed benchmark: its arithmetic on made-up timings, its count of bytes, its cases at toy size, its tables."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import speed
from benchmarks.kept import kept
from benchmarks.speed_cases import BUILDERS, TITLES, TrainingStep
from benchmarks.speed_memory import saved_bytes
from benchmarks.speed_rows import keep
from benchmarks.speed_table import NOTHING, in_short, speed_table
from benchmarks.speed_timing import Limits, Timing, compared, contest, order


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine was slow in the second and third round: the ratio of the medians would be 4 / 2.
    assert compared([1.5, 4.0, 9.0], [1.0, 2.0, 6.0]) == Timing(seconds=4.0, ratio=1.5, low=1.5, high=2.0, rounds=3)


def test_every_round_runs_every_variant_once_in_changing_order() -> None:
    rounds = ["".join(order(["a", "b", "c"], number)) for number in range(6)]
    assert rounds == ["abc", "bca", "cab", "cba", "acb", "bac"]  # each is first, and each follows each other one


def test_a_variant_that_does_not_run_or_diverges_is_missing_with_its_reason() -> None:
    calls: list[str] = []

    def broken() -> None:
        raise RuntimeError("the first line\nand a second")

    class Diverging:
        def __call__(self) -> None:
            calls.append("diverging")

        def problem(self) -> str:
            return "fails: the loss of step 2 is nan"

    makers: dict[str, Any] = {"float": lambda: lambda: calls.append("float"), "one": lambda: broken, "two": Diverging}
    found = contest(makers, "float", Limits(rounds=9, seconds=0.0, warm_up=1, repeats=2))
    assert found.missing == {
        "one": "fails: RuntimeError: the first line",
        "two": "fails: the loss of step 2 is nan",
    }
    assert found.timings["float"].rounds == 3  # the least, whatever time they take
    assert calls[:8] == ["float", "diverging", "float", "float", "diverging", "diverging", "diverging", "diverging"]
    with pytest.raises(RuntimeError, match="the first line"):
        contest(makers, "one", Limits(rounds=3))


def test_saved_bytes_include_tensors_hidden_from_autograd() -> None:
    x = torch.randn(1000, requires_grad=True)
    keeping: list[Tensor] = []

    def forward() -> Tensor:
        keeping.append(x.detach() * 2)
        return x.relu().sum()

    assert saved_bytes(lambda: x.relu().sum()) == pytest.approx(4000, abs=200)  # the loss itself, and rounding up
    assert saved_bytes(forward) == pytest.approx(8000, abs=200)


def test_a_step_trains_frees_its_gradients_and_finds_a_loss_that_is_not_finite() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 1000))
    step = TrainingStep(model, torch.randn(4, 3, 2, 2))
    before = model[1].weight.detach().clone()
    step()
    assert not model[1].weight.equal(before) and model[1].weight.grad is None and step.problem() is None
    with torch.no_grad():
        model[1].bias[3] = torch.nan
    step()
    assert step.problem() == "fails: the loss of step 2 is nan"


def test_the_command_measures_keeps_and_shows_a_toy_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, threads = tmp_path / "speed.jsonl", str(torch.get_num_threads())
    words = ["--models", "squeezenet1_1", "--batch", "2", "--size", "32", "--rounds", "2", "--threads", threads]
    peers = [name for name in BUILDERS if name not in ("float", "qat")]
    speed.main([*words, "--without", *peers, "--out", str(out)])
    rows = kept(out)
    assert [(row["case"], row["variant"]) for row in rows] == [
        (case, variant) for case in speed.CASES for variant in ("float", "qat")
    ]
    assert all({"torch", "python"} <= set(row["versions"]) and row["machine"]["processor"] for row in rows)
    assert "step squeezenet1_1 batch 2: qat: " in capsys.readouterr().err
    memory = speed_table("memory", out).splitlines()
    assert memory[0] == "|  | float | qat |" and memory[2].startswith("| squeezenet1_1, batch 2, 32 px")
    assert memory[2].split("|")[2:4] == [
        f" {rows[4]['saved_bytes'] / 1e6:.0f} MB ",
        f" {rows[5]['saved_bytes'] / rows[4]['saved_bytes']:.2f} ",
    ]


def made_up(variant: str, ratio: float, batch: int = 16, **more: Any) -> dict[str, Any]:
    row = {"case": "step", "subject": "resnet18", "batch": batch, "size": 112, "device": "cpu", "base": "float"}
    row |= {"variant": variant, "seconds": ratio / 4, "ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1}
    row |= {"versions": {"torch": "2.15.0"}, "date": "2026-11-21"}
    row["machine"] = {"processor": "A Processor 7", "flags": ["avx512_vnni"], "cores": 4, "threads": 2}
    return row | more


def test_a_table_has_ratios_what_is_missing_and_the_machine(tmp_path: Path) -> None:
    out = tmp_path / "speed.jsonl"
    assert speed_table("step", out) == in_short(out) == NOTHING
    missing = {"missing": "not installed: No module named 'brevitas'"}
    keep([made_up("float", 1.0), made_up("qat", 0.9), made_up("ao_fx", 1.5), made_up("brevitas", 1, **missing)], out)
    keep([made_up("float", 1.0, 1), made_up("qat", 1.7, 1)], out)
    assert speed_table("step", out).splitlines() == [
        f"|  | float | qat | torch.ao FX | {TITLES['brevitas']} |",
        "|---|---|---|---|---|",
        "| resnet18, batch 1, 112 px | 250 ms | 1.70 (1.60 to 1.80) |  |  |",
        "| resnet18, batch 16, 112 px | 250 ms | 0.90 (0.80 to 1.00) | 1.50 (1.40 to 1.60) | - |",
        "",
        "- Brevitas not installed: No module named 'brevitas'",
        "",
        "A Processor 7 with avx512_vnni, 2 of 4 threads; torch 2.15.0; 2026-11-21.",
    ]
    keep([made_up("float", 1.0), made_up("qat", 0.9), made_up("ao_fx", 1.5), made_up("pt2e", 2.0)], out)
    said = in_short(out)
    assert "**0.90 to 0.90 of the time of a float step**; torch.ao FX and torchao PT2E take\n1.50 to 2.00" in said
    assert "A step with a single image takes 1.70 to 1.70." in said
