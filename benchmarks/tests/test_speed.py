"""The speed benchmark: its arithmetic on made-up timings, its counts of bytes, its cases at toy size."""

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import speed, speed_cases
from benchmarks.speed_alone import alone
from benchmarks.speed_cases import Plan, cold_rows, memory_rows
from benchmarks.speed_memory import held_bytes, peak_growth, saved_bytes
from benchmarks.speed_operators import OPERATORS, operand
from benchmarks.speed_plot import bars, draw
from benchmarks.speed_rows import keep, kept, machine
from benchmarks.speed_step import Setting, TrainingStep, build_float, build_step
from benchmarks.speed_table import (
    NOTHING,
    TABLES,
    cold_table,
    conditions,
    memory_table,
    ratio_table,
)
from benchmarks.speed_timing import Limits, Timing, compared, contest, interleaved, order
from benchmarks.speed_variants import BUILDERS, TITLES

TOY = Setting("squeezenet1_1", batch=2, size=32)
PEERS = [variant for variant in BUILDERS if variant not in ("float", "qat")]


class Clock:
    """A clock that only advances with work; the machine gets slower by `drift` with every reading."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now, self.pace, self.drift = 0.0, 1.0, drift
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.order.append(name)
            self.now += seconds * self.pace
            self.pace += self.drift

        return call


def by_variant(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in rows}


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine was slow in the second and third round: the ratio of the medians would be 4 / 2.
    timing = compared([1.5, 4.0, 9.0], [1.0, 2.0, 6.0], warm_up=7.0)
    assert timing == Timing(seconds=4.0, ratio=1.5, low=1.5, high=2.0, rounds=3, warm_up=7.0)
    with pytest.raises(ValueError):
        compared([1.0], [1.0, 2.0])


def test_a_slowing_machine_hits_all_variants_alike() -> None:
    clock = Clock(drift=0.01)
    makers = {name: functools.partial(clock.work, name, seconds) for name, seconds in (("float", 1.0), ("qat", 1.5))}
    timings = contest(makers, "float", Limits(rounds=40), clock=clock).timings
    assert timings["float"] == Timing(pytest.approx(1.435, abs=0.01), 1.0, 1.0, 1.0, 40, pytest.approx(2.01))
    assert timings["qat"].ratio == pytest.approx(1.5, rel=0.01)
    assert timings["qat"].low < 1.5 < timings["qat"].high


def test_every_round_runs_every_variant_once_in_changing_order() -> None:
    names = ["a", "b", "c"]
    rounds = ["".join(order(names, number)) for number in range(6)]
    assert rounds == ["abc", "bca", "cab", "cba", "acb", "bac"]  # each is first, and each follows each other one
    assert ["".join(order(["a", "b"], number)) for number in range(4)] == ["ab", "ba", "ba", "ab"]


def test_repeats_count_as_one_measurement_and_the_time_limit_leaves_three_rounds() -> None:
    clock = Clock()
    calls = {"a": clock.work("a", 2.0), "b": clock.work("b", 3.0)}
    seconds, broken = interleaved(calls, Limits(rounds=9, seconds=0.5, repeats=4), lambda: None, clock)
    assert (seconds, broken) == ({"a": [2.0] * 3, "b": [3.0] * 3}, {})
    assert clock.order[:8] == ["a"] * 4 + ["b"] * 4


def test_a_variant_that_does_not_run_is_missing_with_its_reason() -> None:
    clock = Clock()

    def broken() -> None:
        raise RuntimeError("the first line\nand a second")

    steps = iter(range(4))

    def breaks_down() -> None:
        assert next(steps) < 3, "in the second round"

    class Diverging:
        def __call__(self) -> None:
            clock.now += 1.0

        def problem(self) -> str:
            return "fails: the loss of step 2 is nan"

    makers: dict[str, Any] = {
        "float": lambda: clock.work("float", 1.0),
        "pt2e": lambda: importlib.import_module("qat_peer_that_nobody_has"),
        "ao_fx": lambda: broken,
        "brevitas": Diverging,
        "qat": lambda: breaks_down,
    }
    found = contest(makers, "float", Limits(rounds=3), clock=clock)
    assert list(found.timings) == ["float"]
    assert found.missing == {
        "pt2e": "not installed: No module named 'qat_peer_that_nobody_has'",
        "ao_fx": "fails: RuntimeError: the first line",
        "brevitas": "fails: the loss of step 2 is nan",
        "qat": "fails: AssertionError: in the second round",
    }
    with pytest.raises(RuntimeError, match="the first line"):
        contest(makers, "ao_fx", Limits(rounds=3), clock=clock)
    with pytest.raises(ArithmeticError, match="brevitas: fails: the loss of step 2 is nan"):
        contest(makers, "brevitas", Limits(rounds=3), clock=clock)


class Hiding(torch.autograd.Function):
    """Keeps one tensor as an attribute of its ctx, one in a closure and one in a list, without save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.hidden = x * 2
        closed = x[:5] * 3
        ctx.again = lambda: closed
        ctx.listed = [(x[:2] * 4,)]
        return x * ctx.hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.hidden


def test_saved_bytes_of_known_graphs() -> None:
    x = torch.randn(1000, requires_grad=True)
    weight = torch.randn(1000, requires_grad=True)
    assert saved_bytes(lambda: x.relu().sum()) == 4000
    assert saved_bytes(lambda: (x * weight).sum()) == 8000
    assert saved_bytes(lambda: (x * weight).sum(), [weight]) == 4000
    assert saved_bytes(lambda: (x.view(10, 100) * x.view(10, 100)).sum()) == 4000  # two views of one storage
    assert saved_bytes(lambda: (x[:10] * 2.0).exp().sum()) == 40  # of exp; multiplying by a number saves nothing
    assert saved_bytes(lambda: x.exp().sin().detach().sum() + x.sum()) == 0  # freed before the forward ends
    assert saved_bytes(lambda: Hiding.apply(x).sum()) == 4000 + 20 + 8


def test_held_bytes_include_tensors_hidden_from_autograd() -> None:
    x = torch.randn(1000, requires_grad=True)
    keeping: list[Tensor] = []

    def forward() -> Tensor:
        keeping.append(x.detach() * 2)
        return x.relu().sum()

    assert saved_bytes(forward) == 4000
    assert held_bytes(lambda: x.relu().sum()) == pytest.approx(4000, abs=200)  # the loss itself, and rounding up
    assert held_bytes(forward) == pytest.approx(8000, abs=200)


def test_peak_growth_includes_memory_that_is_freed_again() -> None:
    growth = peak_growth(lambda: torch.ones(2**26).sum())
    if growth is None:
        pytest.skip("the system keeps no peak of the resident memory that can be set back")
    assert 0.98 * 2**28 < growth < 2**29  # the kernel counts pages in batches
    small = peak_growth(lambda: None)
    assert small is not None and small < 2**24


def test_a_step_trains_frees_its_gradients_and_finds_a_loss_that_is_not_finite() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 1000))
    step = TrainingStep(model, torch.randn(4, 3, 2, 2))
    before = model[1].weight.detach().clone()
    step()
    assert not model[1].weight.equal(before)
    assert model[1].weight.grad is None
    assert step.problem() is None
    with torch.no_grad():
        model[1].bias[3] = torch.nan
    step()
    assert step.problem() == "fails: the loss of step 2 is nan"


@pytest.mark.parametrize("kind", ["activation", "weight"])
def test_operators_put_a_tensor_on_the_same_grid(kind: str) -> None:
    given = operand(kind, (6, 4, 5, 3))
    assert given.x.is_contiguous(memory_format=torch.channels_last)
    expected = OPERATORS["qat"](given).forward()
    assert 20 < len(expected.unique()) <= 361
    for name in ("plain", "fake_quantize", "learnable"):
        call = OPERATORS[name](given)
        torch.testing.assert_close(call.forward(), expected, rtol=1e-5, atol=1e-6)
        call()
    # LSQ as printed in the paper has the same gradients of x and scale as this project's.
    ours, printed = OPERATORS["qat"](given), OPERATORS["plain"](given)
    found = torch.autograd.grad(ours.forward(), ours.inputs[:2], given.grad)
    expected = torch.autograd.grad(printed.forward(), printed.inputs, given.grad)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_operator_case_at_toy_size() -> None:
    plan = Plan(limits=Limits(rounds=2, warm_up=1), without=["ao_fused", "brevitas"])
    (rows,) = speed_cases.op(plan, {"activation": (2, 3, 4, 4)})
    assert [row["variant"] for row in rows] == ["relu", "qat", "plain", "fake_quantize", "learnable"]
    assert all(row["low"] <= row["ratio"] <= row["high"] and row["rounds"] == 2 for row in rows)
    about = {"case": "op", "subject": "activation", "size": [2, 3, 4, 4], "layout": "channels_last", "device": "cpu"}
    about |= {"amp": "none", "variant": "relu", "base": "relu", "seconds": 0, "warm_up": 0}
    assert rows[0] | {"seconds": 0, "warm_up": 0} == about | {"ratio": 1.0, "low": 1.0, "high": 1.0, "rounds": 2}


def test_the_command_measures_and_keeps_a_toy_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.jsonl"
    threads = str(torch.get_num_threads())
    words = ["--cases", "step", "--models", TOY.model, "--batch", "2", "--size", "32", "--rounds", "2"]
    speed.main([*words, "--threads", threads, "--without", *PEERS, "--out", str(out)])
    rows = [row for row in kept(out) if row["case"] == "step"]
    assert [(row["variant"], row["base"], row["rounds"]) for row in rows] == [
        ("float", "float", 2),
        ("qat", "float", 2),
    ]
    assert all({"torch", "torchvision", "python"} <= set(row["versions"]) for row in rows)
    assert all(row["machine"]["threads"] == int(threads) and row["machine"]["processor"] for row in rows)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "step squeezenet1_1 batch 2 on cpu: qat: " in shown.err


def test_memory_of_a_toy_model_is_that_of_the_graph() -> None:
    rows = by_variant(memory_rows(TOY, ["float", "qat", "nobody"], lambda variant: 3 * len(variant)))
    assert rows["float"]["ratio"] == 1.0
    assert rows["qat"]["ratio"] == rows["qat"]["saved_bytes"] / rows["float"]["saved_bytes"]
    assert (rows["qat"]["peak_bytes"], rows["qat"]["peak_ratio"]) == (9, 9 / 15)
    assert rows["nobody"]["missing"] == "fails: KeyError: 'nobody'"
    step = build_step("float", build_float(TOY), TOY.images())
    images = 2 * 3 * 32 * 32 * 4  # allocated before the forward
    held = rows["float"]["held_bytes"]
    assert held == pytest.approx(rows["float"]["saved_bytes"] - images, rel=0.05)
    assert held_bytes(step.loss) == pytest.approx(held, rel=0.05)


def test_a_separate_process_reports_its_measurement_or_the_reason() -> None:
    facts = alone("float", TOY, threads=1, memory=True)
    assert facts["first_step"] > 0 and facts["later_step"] > 0 and facts["preparation"] > 0
    assert facts["peak_growth"] is None or facts["peak_growth"] > 3 * 1_235_496  # most of its gradients
    with pytest.raises(RuntimeError, match=r"^status 1: KeyError: 'nobody'$"):
        alone("nobody", TOY, threads=1)


def test_first_steps_are_compared_round_by_round_with_shared_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[tuple[str, Path]] = []
    first = iter([1.0, 9.0, 2.0, 2.0, 5.0, 3.0, 4.0, 10.0, 4.5])

    def made_up(variant: str, setting: Setting, threads: int, folder: Path) -> dict[str, Any]:
        caches.append((variant, folder))
        preparation = 2.0 if variant == "qat" else 0.5
        return {"preparation": preparation, "first_step": next(first), "later_step": 0.5, "peak_growth": None}

    monkeypatch.setattr(speed_cases, "alone", made_up)
    rows = by_variant(cold_rows(TOY, rounds=3, threads=1))
    assert [name for name, _ in caches] == ["float", "qat", "qat"] * 3
    assert len({folder for _, folder in caches}) == 3
    assert (rows["qat"]["seconds"], rows["qat"]["difference"], rows["qat"]["ratio"]) == (9.0, 6.0, 2.5)
    assert rows["qat"]["difference_prepared"] == 7.5
    assert (rows["qat_kept"]["difference"], rows["float"]["difference"]) == (1.0, 0.0)


def test_a_first_step_that_fails_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(variant: str, *_: Any) -> dict[str, Any]:
        if variant == "qat":
            raise RuntimeError("status 1: no compiler")
        return {"preparation": 0.0, "first_step": 1.0, "later_step": 0.5, "peak_growth": None}

    monkeypatch.setattr(speed_cases, "alone", made_up)
    rows = by_variant(cold_rows(TOY, rounds=2, threads=1))
    assert rows["float"]["ratio"] == 1.0
    assert rows["qat"]["missing"] == rows["qat_kept"]["missing"] == "fails: RuntimeError: status 1: no compiler"


def test_a_comparison_is_kept_as_a_whole(tmp_path: Path) -> None:
    out = tmp_path / "results" / "speed.jsonl"
    op = {"case": "op", "subject": "weight", "size": [4, 3], "device": "cpu"}
    step = {"case": "step", "subject": "resnet18", "batch": 16, "device": "cpu"}
    keep([{**op, "variant": "relu"}, {**op, "variant": "plain"}], out)
    keep([{**step, "variant": "float"}, {**step, "variant": "qat"}, {**step, "batch": 32, "variant": "qat"}], out)
    keep([{**op, "variant": "relu", "again": True}], out)
    keep([{**step, "variant": "float", "again": True}], out)
    assert [(row["case"], row["variant"], row.get("batch"), "again" in row) for row in kept(out)] == [
        ("step", "qat", 32, False),
        ("op", "relu", None, True),
        ("step", "float", 16, True),
    ]


def test_the_machine_in_words(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: A Processor 7\nflags\t\t: fpu avx512_vnni avx2\n\nprocessor : 1\n")
    facts = machine(cpuinfo)
    assert (facts["processor"], facts["flags"]) == ("A Processor 7", ["avx512_vnni"])
    assert machine(tmp_path / "none")["flags"] == []


ABOUT = {
    "versions": {"python": "3.11.7", "torch": "2.15.0"},
    "machine": {"processor": "A Processor 7", "flags": ["avx512_vnni"], "cores": 4, "threads": 2, "load": 0.2},
    "date": "2026-11-21",
}


def made_up_row(variant: str, ratio: float, **more: Any) -> dict[str, Any]:
    row = {"case": "step", "subject": "resnet18", "batch": 16, "size": 112, "device": "cpu", "base": "float"}
    row |= {"variant": variant, "seconds": ratio / 4, "ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1}
    return row | {"rounds": 5} | more | ABOUT


def missing_row(variant: str, why: str, **more: Any) -> dict[str, Any]:
    full = made_up_row(variant, 1.0, **more)
    return {key: full[key] for key in full if key not in ("seconds", "ratio", "low", "high")} | {"missing": why}


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_table_of_ratios(tmp_path: Path) -> None:
    rows = [made_up_row("float", 1.0), made_up_row("ao_fx", 1.5), made_up_row("qat", 0.987)]
    rows += [missing_row("pt2e", "fails: TypeError: a | b < c"), made_up_row("qat", 3.0, device="cuda")]
    rows += [made_up_row("float", 8.0, batch=32), made_up_row("qat", 1.0, batch=32)]
    assert ratio_table("step", written(tmp_path / "rows", rows)).splitlines() == [
        "|  | float | qat | torch.ao FX | torchao PT2E |",
        "|---|---|---|---|---|",
        "| resnet18, batch 16, 112 px | 250 ms | 0.99 (0.89 to 1.09) | 1.50 (1.40 to 1.60) | - |",
        "| resnet18, batch 32, 112 px | 2.00 s | 1.00 (0.90 to 1.10) |  |  |",
        "",
        "- torchao PT2E fails: TypeError: a \\| b &lt; c (resnet18, batch 16, 112 px)",
    ]
    assert ratio_table("op", tmp_path / "rows") == ratio_table("step", tmp_path / "none") == NOTHING


def test_the_tables_of_memory_first_steps_and_kernels(tmp_path: Path) -> None:
    saved = {"case": "memory", "saved_bytes": 90e6, "peak_bytes": 140e6, "peak_ratio": 1.0}
    rows = [made_up_row("float", 1.0, **saved), made_up_row("qat", 0.82, **{**saved, "peak_ratio": 0.9})]
    assert memory_table(written(tmp_path / "rows", rows)).splitlines()[2:] == [
        "| resnet18, batch 16, 112 px | 90 MB / 140 MB | 0.82 / 0.90 |"
    ]
    first = {"case": "cold", "later_step": 0.25, "preparation": 3.0}
    rows = [
        made_up_row("float", 4.0, difference=0.0, difference_prepared=0.0, **first),
        made_up_row("qat", 8.0, difference=1.0, difference_prepared=4.0, **first),
        missing_row("qat_kept", "fails: RuntimeError: gone", case="cold"),
    ]
    busy = [row | {"machine": {**ABOUT["machine"], "load": 5.5}} for row in rows]
    assert "busy machine (load 5.5 on 4 cores" in cold_table(written(tmp_path / "rows", busy)).splitlines()[-1]
    assert cold_table(written(tmp_path / "rows", rows)).splitlines()[2:] == [
        "| resnet18, batch 16, 112 px | float | 1.00 s |  |  | 0.25 s |",
        "| resnet18, batch 16, 112 px | qat | 2.00 s | +1.0 s | +4.0 s | 0.25 s |",
        "| resnet18, batch 16, 112 px | qat, caches kept | fails: RuntimeError: gone |  |  |  |",
    ]


def test_the_conditions_of_a_run(tmp_path: Path) -> None:
    rows = [made_up_row("float", 1.0), made_up_row("qat", 1.0)]
    rows[1] |= {"machine": {**rows[1]["machine"], "load": 1.0}, "date": "2026-11-22"}
    assert conditions(written(tmp_path / "rows", rows)) == (
        "A Processor 7 with avx512_vnni, 2 of 4 threads; python 3.11.7, torch 2.15.0;"
        " 2026-11-21 to 2026-11-22, load 0.2 to 1.0 before each comparison.\n"
    )


def test_the_pages_mark_every_table() -> None:
    root = Path(__file__).resolve().parents[2]
    pages = "".join((root / name).read_text() for name in ("README.md", "docs/speed.md", "docs/measurements.md"))
    assert [name for name in TABLES if pages.count(f"<!-- table: {name} -->") != 1] == []
    assert set(TITLES) >= {*BUILDERS, *OPERATORS}


def test_the_picture_shows_what_ran(tmp_path: Path) -> None:
    rows = [made_up_row("float", 1.0), made_up_row("brevitas", 1.5), made_up_row("qat", 1.0)]
    rows += [missing_row("pt2e", "fails"), made_up_row("float", 1.0, batch=32), made_up_row("qat", 0.9, batch=32)]
    names, variants = bars(rows)
    assert names == ["resnet18\nbatch 16", "resnet18\nbatch 32"]
    ratios = {name: [row and row["ratio"] for row in own] for name, own in variants.items()}
    assert ratios == {"qat": [1.0, 0.9], "brevitas": [1.5, None]}
    with pytest.raises(
        ValueError, match=r"speed.png: no training step is kept; run python -m benchmarks.speed --cases"
    ):
        draw(rows[:1], tmp_path / "speed.png")
    pytest.importorskip("matplotlib", reason="the picture needs the [bench] extra")
    draw(rows, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", ["ao_fx", "brevitas"])
def test_peers_quantize_every_layer_and_train(variant: str) -> None:
    if variant == "brevitas":
        pytest.importorskip("brevitas", reason="a peer, in the [bench] extra")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1000))
    images = torch.randn(2, 3, 8, 8)
    step = build_step(variant, layers, images)
    weight = step.model[0].weight if variant == "brevitas" else step.model.get_submodule("0").weight
    assert weight.equal(layers[0].weight)
    output = step.model(images)
    assert (output - layers(images)).abs().max() > 1e-4  # on a grid
    step()
    assert step.problem() is None and step.model.training
