"""The verbs with .tflite files: export, proof, and the engines of LiteRT and TensorFlow Lite Micro."""

import csv
import ctypes
import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

import qat
from qat.cli import export
from qat.cli.command import main
from qat.export.litert import firmware
from qat.export.litert.file import ReadFile
from tests.cli.conftest import Verb

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tflite_micro")
ENGINES = ("litert", "litert_reference", "tflite_micro")


@pytest.fixture(scope="module")
def exported(pets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of runs/pets, of the target onnxruntime, with its model.tflite, C sources and table."""
    run = tmp_path_factory.mktemp("litert") / "pets"
    shutil.copytree(pets / "runs" / "pets", run)
    files = ["--c-array", "--table", str(run / "table.csv")]  # point 26: without --to it is RUN/model.tflite
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(pets)
        assert main(["export", str(run), "--target", "litert", *files]) == 0
    return run


def test_the_engines_answer_as_torch(exported: Path, verb: Verb) -> None:
    status, out, err = verb("evaluate", str(exported), "--runtime", ",".join(["torch", *ENGINES]), "--json")
    assert status == 0, err
    assert [(each["runtime"], each["same_answers"]) for each in json.loads(out)] == [
        (name, 1.0) for name in ("torch", *ENGINES)
    ]
    for engine in ("litert", "tflite_micro"):
        status, out, err = verb("verify", str(exported), "--runtime", engine, "--layers")
        assert status == 0 and out.startswith("predictions: 100.00 % of 12 are equal; top1 "), err
        assert "the file answers as the trained model" in out
    assert "probable cause: fixed point: LiteRT's kernels round a sum" in out  # of the last engine


def test_the_commands_of_the_page_run(pets: Path, verb: Verb, tmp_path: Path) -> None:
    page = (Path(qat.__file__).parents[1] / "docs" / "deploying.md").read_text()
    lines = re.findall(r"^python -m qat (\w+ runs/pets.*)$", page, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["export", "evaluate", "verify", "predict", "benchmark"]
    shutil.copytree(pets / "runs" / "pets", tmp_path / "pets")
    for line in lines:
        words = line.replace("runs/pets", str(tmp_path / "pets")).replace("photo.png", "images/val/cat/0.png").split()
        status, out, err = verb(*words, *(["--rounds", "1"] if words[0] == "benchmark" else []))
        assert status == 0 and out, err


def test_a_file_alone_is_enough(exported: Path, verb: Verb, tmp_path: Path) -> None:
    shutil.copy(exported / "model.tflite", tmp_path / "alone.tflite")
    picture, alone = "images/val/cat/0.png", str(tmp_path / "alone.tflite")
    scores = {}
    for runtime in ("torch", *ENGINES):
        run = str(exported) if runtime == "torch" else alone
        status, out, err = verb("predict", run, picture, "--json", "--runtime", runtime)
        assert status == 0, err
        scores[runtime] = json.loads(out)[0]["scores"][runtime]
        assert scores[runtime] == pytest.approx(scores["torch"], abs=0.02)
    assert verb("predict", alone, picture)[1].split()[2] == "litert"
    for options in ([alone], [str(exported), "--runtime", "tflite_micro"]):
        status, out, err = verb("benchmark", *options, "--rounds", "1")
        assert status == 0 and out.splitlines()[2].split()[:3] == ["integers", "1", "1"] and "default" not in out, err


def test_another_weight_is_another_model(exported: Path, verb: Verb, tmp_path: Path) -> None:
    copied = tmp_path / "pets"
    shutil.copytree(exported, copied)
    data = bytearray((copied / "model.tflite").read_bytes())
    file = ReadFile(bytes(data))
    weight = next(each for name, each in zip(file.names, file.tensors, strict=True) if name == "features.3.squeeze")
    held = bytes(file._model.buffers[weight.buffer].data)
    at = data.index(held)
    data[at : at + 64] = bytes((each + 128) % 256 for each in data[at : at + 64])
    (copied / "model.tflite").write_bytes(data)
    status, out, _ = verb("verify", str(copied), "--runtime", "litert")
    assert status == 1 and "first layer beyond rounding: features.3.squeeze_quantizer, " in out
    assert "the file computes this layer otherwise" in out and out.endswith("the file is NOT the trained model\n")


def test_integer_ends_are_proven_too(pets: Path, verb: Verb, tmp_path: Path) -> None:
    """Of the run, the average at its end has no grid."""
    path = tmp_path / "model.tflite"
    status, out, err = verb("export", "runs/pets", "--target", "litert", "--to", str(path), "--integer-ends")
    assert (status, out) == (2, "") and not path.exists()
    assert err.startswith("export_litert: output: 'output' is an average that no quantizer follows; prepare")
    assert len(err.splitlines()) == 1


def test_the_multipliers_are_those_of_the_scales(exported: Path) -> None:
    rows = list(csv.DictReader((exported / "table.csv").read_text().splitlines()))
    model = qat.load(exported)
    layer, source = model.get_submodule("features.0"), model.get_submodule("input_quantizer")
    result = model.get_submodule("features.0_quantizer")
    scales = layer.weight_quantizer.grid()[0].detach().double().flatten()
    first = [row for row in rows if row["layer"] == "features.0"]
    assert [int(row["channel"]) for row in first] == list(range(64)) and {row["operator"] for row in first} == {
        "CONV_2D"
    }
    step = float(source.grid()[0].detach()) / float(result.grid()[0].detach())
    for row, scale in zip(first, scales.tolist(), strict=True):
        multiplier, shift = int(row["multiplier"]), int(row["shift"])
        real = multiplier * 2.0 ** (shift - 31)
        ratio = step * scale / real  # weights of few bits lie on multiples by a power of two
        assert 2**30 <= multiplier < 2**31
        assert ratio == pytest.approx(round(ratio), rel=1e-6) and round(ratio) in (1, 2, 4, 8)


def test_the_c_sources_hold_the_file(exported: Path, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("no C compiler here")
    library = tmp_path / "model.so"
    options = ["-std=c11", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([compiler, *options, str(exported / "model.c")], check=True)
    loaded, data = ctypes.CDLL(str(library)), (exported / "model.tflite").read_bytes()
    assert ctypes.c_uint.in_dll(loaded, "model_tflite_len").value == len(data)
    held = (ctypes.c_ubyte * len(data)).in_dll(loaded, "model_tflite")
    assert bytes(held) == data and ctypes.addressof(held) % 16 == 0


@pytest.mark.skipif(find_spec("ethosu") is None, reason="ethos-u-vela is not installed")
def test_vela_estimates(exported: Path) -> None:
    found = firmware.vela_estimate(exported / "model.tflite", "ethos-u55-128")
    assert found["cycles"] > 1e5 and found["SRAM"] > 10 and found["flash"] > 500
    with pytest.raises(ValueError, match=r"invalid choice: 'ethos-u1'.*\(vela\)$"):
        firmware.vela_estimate(exported / "model.tflite", "ethos-u1")


LITERT = ["export", "runs/pets", "--target", "litert", "--to", "x.tflite"]


@pytest.mark.parametrize(("arguments", "said"), [
    ([*LITERT, "--format", "qdq"], "--format: is no option of --target litert; leave it out"),
    ([*LITERT, "--exact-sums"], "--exact-sums: is no option of --target litert; leave it out"),
    (["export", "runs/pets", "--to", "x.onnx", "--c-array"], "--c-array: is no option of --target onnx; leave it"),
    ([*LITERT, "--table", "no/x.csv"], "--table: 'no/x.csv': there is no folder 'no'"),
    (["verify", "runs/pets", "--runtime", "litert"],
     "RUN: 'runs/pets' has no model.tflite; python -m qat export runs/pets --target litert writes it"),
    (["verify", "runs/pets", "--runtime", "litert", "--default-session"], "--default-session: is of ONNX Runtime"),
    (["predict", "runs/pets/model.onnx", "x.png", "--runtime", "litert"],
     "--runtime: litert reads .tflite files, and RUN is 'runs/pets/model.onnx'"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(arguments: list[str], said: str, verb: Verb) -> None:
    status, out, err = verb(*arguments)
    assert (status, out) == (2, "") and err.startswith(said) and len(err.splitlines()) == 1, err


@pytest.mark.parametrize("content", [b"no model at all", b"\x1c\0\0\0TFL3" + bytes(40)])
def test_a_broken_file_is_one_sentence(content: bytes, verb: Verb, tmp_path: Path) -> None:
    (tmp_path / "broken.tflite").write_bytes(content)
    status, out, err = verb("benchmark", str(tmp_path / "broken.tflite"))
    assert (status, out) == (2, "") and "does not open it: " in err and len(err.splitlines()) == 1, err


def test_what_is_missing_is_named(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda module: None if module == "ethosu" else module)
    status, out, err = verb(*LITERT, "--vela", "ethos-u55-128")
    assert (status, out, err) == (2, "", "--vela: ethosu is not installed; pip install ethos-u-vela\n")


def test_files_of_firmware_are_not_written_over(exported: Path, verb: Verb) -> None:
    (exported / "other.h").write_text("mine")
    path = str(exported / "other.tflite")
    status, _, err = verb("export", str(exported), "--target", "litert", "--to", path, "--c-array")
    assert status == 2 and re.match(r"--to: '.*other\.h' exists; choose another name", err)
