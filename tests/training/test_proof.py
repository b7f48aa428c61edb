"""A run's proof on either kind of processor: both rows, the sentences, and the layers that may saturate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from test_train import CONFIG, TINY_MODEL, start, summary

from qat.export import LayerDifference, Saturation, Verification
from qat.export.onnxruntime import default_session
from qat.kernels.cpu import onednn, processor
from qat.training.config.schema import RunConfig
from qat.training.run.proof import Proof
from qat.training.run.report import onnx_results, session_results, write_summary

DEFAULT_ROW = "ONNX Runtime, default session"
FILES = {"tinymodels.py": TINY_MODEL, "tiny.yaml": CONFIG}
UNTRAINED = ("run_dir=run", "float.epochs=0", "qat.epochs=0")


Finish: TypeAlias = Callable[..., tuple[dict[str, Any], str, str]]


def take_for(processors: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    if processors is not None:
        monkeypatch.setenv(processor.VARIABLE, processors)


@pytest.fixture
def finish(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Finish:
    """A run on a kind of processor: the summary's `onnx`, what was printed, and layers.txt."""

    def run(processors: str | None, *overrides: str) -> tuple[dict[str, Any], str, str]:
        take_for(processors, monkeypatch)
        assert start(*UNTRAINED, "float.epochs=1", *overrides) == 0
        found = summary(folder / "run")["onnx"]
        return found, capsys.readouterr().out, (folder / "run" / "layers.txt").read_text()

    return run


def test_without_vnni_the_default_session_has_a_row_and_a_sentence(finish: Finish) -> None:
    found, printed, table = finish("no-vnni")
    default = found["default_session"]
    assert set(default) == {"top1", "agreement", "max_logit_difference", "layers"}
    assert found["agreement"] >= 0.995 and default["layers"]["compared"] == found["layers"]["compared"] > 0
    assert sum(line.startswith(DEFAULT_ROW) for line in printed.splitlines()) == 1
    (sentence,) = [line for line in printed.splitlines() if "default session adds" in line]
    assert sentence.startswith(
        "ONNX Runtime's default session adds pairs of products in 16 bits on this processor (no VNNI), where 3 of 3"
        f" layers may saturate: val top1 {default['top1']:.2f} %, "
    )
    assert sentence.endswith(
        "exact are a session with session.x64quantprecision=1 in its options, and a model that cannot saturate"
        " (quantization.target=onnxruntime_x86)"
    )
    assert found["saturation"]["layers"] == 3 and found["saturation"]["channels"] <= 8 + 8 + 10
    assert list(found["saturation"]["by_layer"]) == ["0", "4", "8"]
    assert "3 layers may saturate where two products are added in 16 bits (x86 without VNNI): exact are" in table
    assert table.startswith("name") and "largest sum" in table


def test_with_vnni_there_is_one_row(finish: Finish) -> None:
    found, printed, table = finish("vnni")
    assert "default_session" not in found and "default session" not in printed
    assert "3 layers may saturate" in table


@pytest.mark.parametrize(
    "override", ["quantization.target=onnxruntime_x86", "quantization.overrides={'*': {weight: {max_magnitude: 64}}}"]
)
def test_a_model_that_cannot_saturate_needs_no_sentence(override: str, finish: Finish) -> None:
    found, printed, table = finish("no-vnni", override)
    assert found["saturation"]["layers"] == 0 and found["default_session"]["agreement"] >= 0.995
    assert DEFAULT_ROW in printed and "may saturate" not in printed
    assert table.endswith("sums of two products fit 16 bits in every layer: exact on x86 without VNNI in any session\n")


def test_without_the_variable_the_real_processor_decides(finish: Finish) -> None:
    found, _, _ = finish(None)
    assert ("default_session" in found) is not default_session.multiplies_exactly(with_option=False)


def test_a_processor_without_exact_products_is_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_session, "multiplies_exactly", lambda with_option: False)
    assert start(*UNTRAINED) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{folder}/run/model.onnx: ONNX Runtime ") and said.endswith("without the proof")


@pytest.mark.parametrize("asked", [None, "no-vnni", "vnni"])
def test_the_summary_names_the_processor(asked: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_for(asked, monkeypatch)
    assert start(*UNTRAINED, "export.onnx=false") == 0
    machine = summary(folder / "run")["machine"]
    assert machine["exact_integer_products"] == {
        "torch": onednn.is_exact_natively(),
        "onnxruntime_default": default_session.multiplies_exactly(with_option=False),
    }
    assert machine["taken_for"] == asked and machine["processor"] and machine["threads"] >= 1


def test_the_summary_is_json_or_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_summary(tmp_path / "summary.json", RunConfig(), {"versions": {}}, {"qat": {"loss": float("nan")}}, 1.0, 0)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_of_processor_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(processor.VARIABLE, "amd")
    assert start() == 2
    assert capsys.readouterr().err == "QAT_PROCESSOR must be vnni, no-vnni or unset, got 'amd'\n"


@pytest.mark.parametrize(
    ("agreement", "largest", "problems"),
    [
        (1.0, 1, []),
        (0.995, 1, []),
        (0.9949, 0, ["only 99.49 % of its predictions are the torch model's"]),
        (float("nan"), 0, ["only nan % of its predictions are the torch model's"]),
        (1.0, 2, ["its integers differ by more than one level in 1 layers (a first)"]),
    ],
)
def test_too_little_agreement_or_too_large_differences_are_problems(
    agreement: float, largest: int, problems: list[str]
) -> None:
    layers = [LayerDifference("a", 10, 1, largest)]
    results = onnx_results(Verification(4, agreement, None, None, 0.0), layers, {}, 1, [])
    assert Proof(results, layers, []).problems() == problems


def test_numbers_that_json_lacks_become_null() -> None:
    found = session_results(Verification(4, 0.0, None, None, float("nan")), [])
    assert found["max_logit_difference"] is None and found["top1"] is None


def test_a_layer_in_float_is_named() -> None:
    saturation = [Saturation("a", (40_000, 3))]
    results = onnx_results(Verification(4, 1.0, None, None, 0.0), [], {"Conv": 2, "QGemm": 1}, 1, saturation)
    proof = Proof(results, [], saturation)
    assert proof.sentences() == [
        "ONNX Runtime: 100.00 % equal predictions; 0 of 0 integers differ over 0 layers",
        "ONNX Runtime computes these in float: 2 Conv; layers.txt says which layers stay float",
    ]
    assert proof.saturation_table().splitlines()[-1].split() == ["a", "2", "1", "40,000"]
