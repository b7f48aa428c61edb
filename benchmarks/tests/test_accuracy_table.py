"""The tables of docs/measurements.md and the results in the configs are what the kept results say."""

from pathlib import Path

import pytest

from benchmarks import accuracy_table

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "# A recipe.\n# Result: old.\n\nseed: 0  # Result: of a comment inside\n"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Two seeds of one row, and a network that trained in float first."""
    about = {"date": "2026-01-01", "commit": "abc", "machine": {"processor": "a CPU", "threads": 1}}
    row = {"row": "resnet20_cifar10_w2a2", "bits": 2, "what": "our recipe", "epochs": 6, "float": 91.5}
    row |= {"float_finetune": None, "calibrated": 10.0, "agreement": 0.999, "standard_error": 1.0, "train_loss": 0.25}
    row |= {"versions": {"torch": "2"}} | about
    found = [row | {"seed": n, "qat": q, "onnx": q, "difference": q - 91.5} for n, q in enumerate((89.0, 90.0))]
    found.append(found[0] | {"row": "other", "what": "MobileNetV2, our recipe", "own_float": True})
    monkeypatch.setattr(accuracy_table, "results", lambda: found)
    return found


def test_a_row_is_the_mean_of_its_seeds(results: list[dict]) -> None:
    table = accuracy_table.accuracy_table()
    (line,) = [line for line in table.splitlines() if line.startswith("| 2 | our recipe | 6")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    spread = "89.5 % (89.0 to 90.0)"
    assert cells[3:] == ["2", "10.0 % (10.0 to 10.0)", spread, spread, "99.9 % (99.9 to 99.9)", "-2.0 ± 1.0", "0.250"]
    assert "Float: 91.5 % as published." in table and "a CPU; last measured 2026-01-01 at abc" in table
    others = accuracy_table.accuracy_table(own_float=True)
    assert "MobileNetV2" not in table and "Float: MobileNetV2 91.5 %." in others and "as published" not in others


def test_a_config_says_what_its_row_gave(results: list[dict]) -> None:
    given = accuracy_table.with_result(CONFIG, "resnet20_cifar10_w2a2")
    said = "89.5 % (89.0 to 90.0) top-1 (91.5 % in float; 2 seeds), a CPU, 2026-01-01, commit abc"
    said = f"{said}; see docs/measurements.md."
    assert given == CONFIG.replace("old.", said)
    assert accuracy_table.with_result(CONFIG, "not_a_row") == CONFIG


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configs_have_the_results_that_are_kept(path: Path) -> None:
    assert accuracy_table.with_result(path.read_text(), path.stem) == path.read_text()
