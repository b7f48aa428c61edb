"""What a user meets first: answers without slow imports, in his words, and output that a file can hold."""

import subprocess
import sys
from pathlib import Path

import pytest

from qat.training import script
from tests.cli.conftest import Verb

SLOW = ("torchvision", "torch._dynamo", "torch._inductor", "sympy", "tensorboard", "matplotlib", "openvino")
"""What no answer here needs; torchvision imports torch's compiler, which takes as long as torch."""


@pytest.mark.parametrize(("program", "status"), [
    ("qat.training.script --help", 0),
    ("qat.training.script nothing.yaml", 2),
    ("qat.cli.command --help", 0),
    ("qat.cli.command evaluate runs/pet", 2),
    ("qat.cli.command predict {pets}/runs/pets/model.onnx {pets}/images/val/cat/0.png", 0),
])  # fmt: skip
def test_it_answers_without_what_is_slow_to_import(pets: Path, program: str, status: int) -> None:
    module, *words = program.format(pets=pets).split()
    code = (
        f"import sys\nfrom {module} import main\ntry: status = main({words})\nexcept SystemExit as end: status ="
        f" end.code\nprint('end', status, [name for name in {SLOW} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == f"end {status} []", found.stderr


@pytest.mark.parametrize("words", [
    ["tiny.yaml", "qat.epochs=2", "seed=1"],
    ["--config", "tiny.yaml", "qat.epochs=2", "seed=1"],
    ["qat.epochs=2", "tiny.yaml", "seed=1"],
    ["qat.epochs=2", "--config", "tiny.yaml", "seed=1"],
])  # fmt: skip
@pytest.mark.parametrize("program", ["train.py", "qat train"])
def test_a_config_needs_no_option(words: list[str], program: str, monkeypatch: pytest.MonkeyPatch, verb: Verb) -> None:
    read: list[object] = []
    monkeypatch.setattr(script, "load_config", lambda path, overrides, folder: read.append((path, overrides)))
    monkeypatch.setattr(script, "run", lambda config, dry: 0)
    assert script.main(words) == 0 if program == "train.py" else verb("train", *words)[0] == 0
    assert read == [("tiny.yaml", ["qat.epochs=2", "seed=1"])]


def test_without_a_config_it_says_what_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["qat.epochs=2"]) == 2
    assert capsys.readouterr().err == "CONFIG: missing; name a YAML file, such as resnet_int8.yaml\n"
