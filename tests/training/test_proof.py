"""A run's proof on either kind of processor: both rows, the sentences, and the layers that may saturate."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from qat.export import Differences, LayerDifference, Saturation, Verification
from qat.export.onnxruntime import session
from qat.kernels.cpu import onednn, processor
from qat.training.config.schema import RunConfig
from qat.training.run import proof as proof_module
from qat.training.run.proof import Proof, onnx_results, session_results
from qat.training.run.report import report_lines, write_summary
from tests.runs import small_run
from tests.runs.small_run import start, summary
from tests.runs.tiny_training import user_error

DEFAULT_ROW = "ONNX Runtime, default session"
FILES = small_run.FILES
Finish: TypeAlias = Callable[..., tuple[dict[str, Any], str, str]]


@pytest.fixture
def finish(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Finish:
    """A run on a kind of processor: the summary's `onnx`, what was printed, and layers.txt."""

    def run(processors: str, *overrides: str) -> tuple[dict[str, Any], str, str]:
        monkeypatch.setenv(processor.VARIABLE, processors)
        assert start("run_dir=run", "float.epochs=1", "qat.epochs=0", *overrides) == 0
        found = summary(folder / "run")["onnx"]
        return found, capsys.readouterr().out, (folder / "run" / "layers.txt").read_text()

    return run


def test_without_vnni_the_default_session_has_a_row_and_a_sentence(finish: Finish) -> None:
    found, printed, table = finish("no-vnni")
    default = found["default_session"]
    assert set(default) == {"top1", "agreement", "close", "max_logit_difference", "layers"}
    assert found["agreement"] >= 0.995 and default["layers"]["compared"] == found["layers"]["compared"] > 0
    assert sum(line.startswith(DEFAULT_ROW) for line in printed.splitlines()) == 1
    (sentence,) = [line for line in printed.splitlines() if "default session adds" in line]
    assert f"3 of 3 layers may saturate: val top1 {default['top1']:.2f} %, " in sentence
    assert found["saturation"]["layers"] == 3 and found["saturation"]["channels"] <= 8 + 8 + 10
    assert "3 layers may saturate where two products are added in 16 bits (x86 without VNNI): exact are" in table
    assert table.startswith("name") and "largest sum" in table


def test_with_vnni_there_is_one_row_and_the_summary_names_the_processor(finish: Finish, folder: Path) -> None:
    found, printed, table = finish("vnni")
    assert "default_session" not in found and "default session" not in printed
    assert "3 layers may saturate" in table
    machine = summary(folder / "run")["machine"]
    assert machine["exact_integer_products"]["torch"] == onednn.is_exact_natively()
    assert machine["taken_for"] == "vnni" and machine["processor"] and machine["threads"] >= 1


def test_a_processor_without_exact_products_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "multiplies_exactly", lambda with_option: False)
    said = user_error(proof_module.prove, Path("model.onnx"), None, [])
    assert said.startswith("model.onnx: ONNX Runtime ") and said.endswith("without the proof")


def proven(agreement: float = 1.0, layers: Any = (), operators: Any = None, saturation: Any = (), **more: Any) -> Proof:
    """The proof of a file with such a share of equal predictions."""
    found = Verification(more.pop("samples", 4), agreement, None, None, more.pop("gap", 0.0))
    results = onnx_results(found, list(layers), operators or {}, 1, list(saturation))
    return Proof(results, list(layers), list(saturation), **more)


def test_the_summary_is_json_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_summary(tmp_path / "summary.json", RunConfig(), {"versions": {}}, {"qat": {"loss": math.nan}}, 1.0, "")
    assert list(tmp_path.iterdir()) == []
    found = session_results(Verification(4, 0.0, None, None, math.nan), [])
    assert found["max_logit_difference"] is None and found["top1"] is None


DIFFER = (
    "only {} % of its predictions are the torch model's, and near-ties of rounding do not explain the others (largest"
    " difference of a logit 0)"
)


@pytest.mark.parametrize(("agreement", "largest", "problems"), [
    (1.0, 1, []),
    (0.995, 1, []),
    (0.9949, 0, [DIFFER.format("99.49")]),
    (math.nan, 0, [DIFFER.format("nan")]),
    (1.0, 2, ["its integers differ by more than one level in 1 layer (a first)"]),
])  # fmt: skip
def test_too_little_agreement_or_too_large_differences_are_problems(
    agreement: float, largest: int, problems: list[str]
) -> None:
    assert proven(agreement, [LayerDifference("a", 10, 1, largest)]).problems() == problems


@pytest.mark.parametrize(("unexplained", "holds"), [(0, True), (1, True), (2, False)])
def test_predictions_that_near_ties_explain_are_a_warning(unexplained: int, holds: bool) -> None:
    differences = Differences(286, 7, unexplained, [LayerDifference("a", 10, 1, 1), LayerDifference("b", 10, 3, 1)])
    proof = proven(1 - 7 / 286, samples=286, gap=0.08, differences=differences)
    warnings = [
        "onnx: 7 of 286 predictions are not the torch model's, because of near-ties: in their batches 4 of 20"
        " integers (most in b) were rounded to the neighbour, and torch goes on from them to the same answers (largest"
        " difference of a logit 0.08); this model makes another class of a rounding, on any runtime:"
        " docs/run_folder.md says how to make it steadier (Exit status 1)"
    ]
    assert (proof.problem() == "", proof.warnings()) == (holds, warnings if holds else [])


def test_a_collapsed_grid_is_named() -> None:
    layers = [LayerDifference("a", 10, 1, 2), LayerDifference("b", 10, 1, 3)]
    assert proven(layers=layers, collapsed=frozenset({"b", "c"})).problem() == (
        "its integers differ by more than one level in 2 layers (a first) and the grid of b collapsed: its scale rests"
        " on its floor, where float32 rounding of large values is more than a level (a lower qat.lr keeps it, or a"
        " better float model); do not deploy it: docs/run_folder.md says what now (Exit status 1)"
    )


def test_a_layer_in_float_is_named() -> None:
    proof = proven(operators={"Conv": 2, "QGemm": 1}, saturation=[Saturation("a", (40_000, 3))])
    assert proof.sentences() == [
        "ONNX Runtime: 100.00 % equal predictions; 0 of 0 integers differ over 0 layers",
        "ONNX Runtime computes these in float: 2 Conv; layers.txt says which layers stay float",
    ]
    assert proof.saturation_table().splitlines()[-1].split() == ["a", "2", "1", "40,000"]
    assert proven().saturation_table().startswith("sums of two products fit 16 bits in every layer: exact on x86")


def test_the_table_says_what_it_is_worth() -> None:
    layers = {"differing": 1234, "elements": 10_000, "compared": 3}
    said = {
        "qat": {"top1": 50.0, "epochs": 1},
        "onnx": {"top1": 50.0, "agreement": 1.0, "size_bytes": 1, "layers": layers},
        "val_images": 400,
        "seconds": 9.7,
        "machine": {"threads": 2},
        "versions": {"torch": "2.15.0", "onnx": "1.23.2"},
    }
    assert report_lines(said)[-3:] == [
        "top1 is of 400 images: +-5.0 points (two standard deviations) on others",
        "1,234 of 10,000 integers differ over 3 layers; 10 s on 2 threads",
        "torch 2.15.0, onnx 1.23.2",
    ]
