"""A target that a user's module registers (the one in docs/targets.md), named in recipes and in configs."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import qat
from qat.spec import QuantSpec
from qat.targets import profile_of, register_target, shipped
from tests.runs import small_run
from tests.runs.small_run import refusal, standing_in, start, summary
from tests.targets.test_targets import SHIPPED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "targets.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """A user's folder with the module and the config of the page."""
    _, module = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    _, section = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    config = small_run.CONFIG.replace("quantization: {calibration_batches: 2}\n", section)
    before = dict(shipped._profiles)
    with standing_in(tmp_path, {**small_run.FILES, "my_targets.py": module, "tiny.yaml": config}):
        yield tmp_path
    shipped._profiles.clear()
    shipped._profiles.update(before)


def test_a_config_names_a_target_that_its_imports_register(folder: Path) -> None:
    assert start("run_dir=run", "float.epochs=0", "qat.epochs=1") == 0
    assert "int4 symmetric per tensor" in (folder / "run" / "layers.txt").read_text()
    assert summary(folder / "run")["onnx"]["agreement"] == 1.0
    assert "target: my_chip" in (folder / "run" / "config.yaml").read_text()
    assert qat.QuantRecipe(target="my_chip").activation.bits == 4


@pytest.mark.parametrize(
    ("override", "fact"),
    [
        ("imports=[]", f"quantization.target: unknown target 'my_chip'; registered: {', '.join(SHIPPED)}"),
        ("quantization.activation.bits=8", "my_chip: its multipliers take 4-bit activations"),
    ],
)
def test_a_mistake_is_one_sentence_before_the_data_are_read(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, fact: str
) -> None:
    no_data = "data={name: npz, root: missing.npz}"
    assert fact in refusal(capsys, override, no_data)


def test_a_profile_may_leave_its_reasons_out() -> None:
    profile = register_target(replace(profile_of("tensorrt"), name="silent_chip", reasons={}))
    assert profile.refusal("activation", QuantSpec(signed=False)) == (
        "an unsigned activation does not run on silent_chip; use signed=True"
    )
    assert qat.QuantRecipe(target="silent_chip").activation == profile.activation


def test_only_a_profile_with_a_name_of_its_own_is_registered() -> None:
    with pytest.raises(TypeError, match=r"^register_target: expected a TargetProfile, got 'my_chip'$"):
        register_target("my_chip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^target 'tensorrt' is registered already; give the profile another name$"):
        register_target(replace(profile_of("tensorrt"), quantizes_outputs=True))
