"""`python -m qat bits`: the bits that it finds, the config that it writes, and what it refuses."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from qat.training.config.file import load_config
from tests.cli.conftest import Verb
from tests.runs.finished_runs import PLAIN, SIZES, in_place, write_own


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a calibrated run of a model of one's own."""
    place = write_own(tmp_path_factory.mktemp("bits"))
    assert in_place(place, "--config", "own.yaml", *SIZES, "run_dir=run", *PLAIN) == 0
    return place


@pytest.fixture
def bits(calibrated: Path, verb: Verb) -> Callable[..., Any]:
    return lambda *given: verb("bits", "run", "--model", "tinymodels:tiny", *given, place=calibrated)


def test_the_config_has_the_bits_of_the_budget_and_trains(bits: Callable[..., Any], calibrated: Path) -> None:
    status, out, err = bits("--choices", "2,4,8", "--size", "4")
    assert status == 0, err
    rows = dict(re.findall(r"^([05]) +(\d) ", out, re.MULTILINE))
    config = load_config(str(calibrated / "run" / "bits.yaml"))
    found = {name: each.weight.bits for name, each in config.quantization.overrides.items()}
    assert found == {name: int(each) for name, each in rows.items()} and set(found) == {"0", "5"}
    written = yaml.safe_load((calibrated / "run" / "bits.yaml").read_text())["quantization"]["overrides"]
    assert written["0"] in ({"weight": {"bits": found["0"]}}, {"weight": {"bits": 8, "narrow_range": True}})
    assert 216 * found["0"] + 320 * found["5"] <= 4 * (216 + 320)
    where = [f"run_dir={calibrated / 'trained'}", "qat.epochs=1"]
    assert in_place(calibrated, "--config", str(calibrated / "run" / "bits.yaml"), *where) == 0
    layers = (calibrated / "trained" / "layers.txt").read_text()
    assert f"int{found['0']}" in layers and f"int{found['5']}" in layers


def test_bit_operations_are_those_of_weights_and_inputs(bits: Callable[..., Any], calibrated: Path) -> None:
    status, _, err = bits("--choices", "2,4,8", "--bops", "4")
    assert status == 0, err
    found = load_config(str(calibrated / "run" / "bits.yaml")).quantization.overrides
    assert all(each.weight.bits == each.activation.bits in (2, 4, 8) for each in found.values())
    macs = {"0": 12 * 12 * 216, "5": 320}
    assert sum(macs[name] * each.weight.bits**2 for name, each in found.items()) <= 16 * sum(macs.values())


def test_the_smallest_size_within_a_drop(bits: Callable[..., Any]) -> None:
    status, out, err = bits("--choices", "2,4,8", "--drop", "3")
    assert status == 0, err
    below = float(re.search(r"calibrated, before training: (-?[\d.]+) points", out)[1])  # type: ignore[index]
    assert below <= 3
    assert "as found" in out


def test_a_drop_that_no_choice_keeps_is_said_with_status_1(bits: Callable[..., Any]) -> None:
    status, out, _ = bits("--choices", "2", "--drop", "0.1")
    assert status == 1 and "no choice of these bits is at most 0.1 points below float" in out


def test_overrides_count_and_a_layer_keeps_what_its_own_say(bits: Callable[..., Any], calibrated: Path) -> None:
    own = "quantization.overrides={'5': {weight: {granularity: tensor}, activation: {rule: ema}}}"
    status, out, err = bits("--choices", "4,8", "--size", "8", own, "quantization.activation.init=minmax")
    assert status == 0, err
    found = load_config(str(calibrated / "run" / "bits.yaml")).quantization
    assert (found.overrides["5"].weight.granularity, found.overrides["5"].activation.rule) == ("tensor", "ema")
    assert found.overrides["5"].weight.bits == 8 and found.activation.init == "minmax"
    status, out, err = bits("--choices", "4,8", "--size", "6", "quantization.first_bits=8")
    assert status == 0 and not re.search(r"^0 +\d", out, re.MULTILINE), err


@pytest.mark.parametrize(("given", "said"), [
    ([], "bits: no budget; give --size 4, --bops 4 or --drop 0.5"),
    (["--size", "1"], "allocate: the cheapest choices take 134 bytes, and the budget is 67"),
])  # fmt: skip
def test_what_it_refuses(bits: Callable[..., Any], given: list[str], said: str) -> None:
    status, _, err = bits(*given)
    assert status == 2 and said in err, err


def test_a_config_that_fixes_all_bits_is_a_sentence(calibrated: Path, verb: Verb) -> None:
    fixed = calibrated / "fixed"
    shutil.copytree(calibrated / "run", fixed)
    text = (fixed / "config.yaml").read_text()
    (fixed / "config.yaml").write_text(re.sub("(first|last)_bits: null", r"\1_bits: 8", text))
    status, _, err = verb("bits", "fixed", "--model", "tinymodels:tiny", "--size", "4", place=calibrated)
    assert status == 2 and "bits: the config fixes the bits of every layer" in err
