"""The verbs of `python -m qat` on finished runs: what they print, write and refuse."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

import qat
from qat.cli import runtimes
from qat.cli.command import VERBS, build_parser
from qat.quantizer import registry
from qat.training import script
from qat.training.run.checkpoint import state_digest
from tests.cli.conftest import Verb
from tests.runs.finished_runs import in_place


def test_every_verb_has_help_with_an_example(verb: Verb) -> None:
    for name, module in VERBS.items():
        status, out, _ = verb(name, "--help")
        assert status == 0 and f"example: python -m qat {name} {'' if name == 'train' else 'runs/'}" in out
        assert str(module.__doc__) in out
        assert build_parser().parse_args(module.EXAMPLE.split()[3:]).run == module.run
    status, out, _ = verb("--help")
    assert status == 0 and all(name in out for name in VERBS)
    assert "example: python -m qat train resnet_int8.yaml" in out


def test_train_py_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    assert "example: python train.py resnet_int8.yaml" in capsys.readouterr().out


def test_it_is_a_module_that_python_runs() -> None:
    shown = subprocess.run([sys.executable, "-m", "qat", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == qat.__version__


MISTAKES = [
    (["verify", "nothing"], "RUN: 'nothing' does not exist (looked in '"),
    (["verify", "images"], "RUN: 'images' has no config.yaml; give the folder of a run of train.py, or a model.o"),
    (["predict", "pets.yaml", "x.png"], "RUN: 'pets.yaml' is no .onnx or .tflite file; give the folder of"),
    (["predict", "runs/pets", "x.png"], "IMAGE: 'x.png' does not exist (looked in '"),
    (["verify", "runs/pets/model.onnx"], "RUN: 'runs/pets/model.onnx' is a file; this needs the folder of its run"),
    (["evaluate", "runs/pets", "data.root=nowhere"], "data.root: 'nowhere/train' cannot be read"),
    (["export", "runs/pets", "--to", "runs/pets/model.onnx"], "--to: 'runs/pets/model.onnx' exists; choose another"),
    (["export", "runs/pets", "--to", "no/model.onnx"], "--to: 'no/model.onnx': there is no folder 'no'"),
    (["sensitivity", "runs/pets/model.onnx"], "RUN: 'runs/pets/model.onnx' is a file; this needs the folder of"),
    (["compare", "runs/pets"], "RUN: one run has nothing to be compared with; name two or more"),
    (["benchmark", "runs/pets", "--json", "no/x.json"], "--json: 'no/x.json': there is no folder 'no'"),
    (["evaluate", "runs/pets", "--import", "no_such"], "--import: no module 'no_such', neither in the current fold"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_one_sentence(arguments: list[str], said: str, verb: Verb) -> None:
    status, out, err = verb(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(said) and len(err.splitlines()) == 1 and "Traceback" not in err and "resume" not in err


OWN_RULE = """
import qat
from qat.functional import fake_quantize

@qat.register_quantizer("own_rule")
class OwnRule(qat.Quantizer):
    def quantize(self, x):
        return fake_quantize(x, *self.grid(), *self.bounds())
"""
ON_A_RUN = {
    "predict": ["x.png"], "evaluate": [], "verify": [], "sensitivity": ["--images", "8"], "bits": ["--size", "8"],
    "benchmark": ["--rounds", "1", "--batch", "1"], "export": ["--to", "x.onnx"],
}  # fmt: skip


@pytest.fixture(scope="module")
def ruled(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run runs/ruled, whose weights are on a rule of one's own."""
    place = Path(shutil.copytree(own, tmp_path_factory.mktemp("ruled") / "own"))
    (place / "own_rules.py").write_text(OWN_RULE)
    rule = ["imports=[own_rules]", "quantization.weight.rule=own_rule", "qat.epochs=1", "float.epochs=0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_QUANTIZERS", dict(registry._QUANTIZERS))
        assert in_place(place, "--config", "own.yaml", "run_dir=runs/ruled", *rule) == 0
    sys.modules.pop("own_rules")
    return place


@pytest.mark.parametrize("name", VERBS)
def test_the_verbs_open_a_run_with_a_rule_of_ones_own(
    name: str, ruled: Path, verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Point 29: from any folder, with --import; without it no code is imported, and the sentence says what to do."""
    assert ("--import" in verb(name, "--help")[1]) == (name in ON_A_RUN)
    if name not in ON_A_RUN:
        return
    monkeypatch.setattr(registry, "_QUANTIZERS", dict(registry._QUANTIZERS))
    monkeypatch.syspath_prepend(ruled)
    Image.new("RGB", (16, 16)).save(tmp_path / "x.png")
    command = [name, str(ruled / "runs" / "ruled"), *ON_A_RUN[name], "--model", "tinymodels:tiny"]
    needs = name not in ("predict", "benchmark")  # they run model.onnx
    status, _, err = verb(*command, place=tmp_path)
    assert (status == 2 and "the run imported own_rules: import that first" in err) if needs else status == 0, err
    assert "own_rules" not in sys.modules
    status, out, err = verb(*command, "--import", "own_rules", place=tmp_path)
    assert status == 0 and "own_rules" in sys.modules, f"{out}{err}"
    sys.modules.pop("own_rules")


def test_evaluate_is_what_the_run_measured(pets: Path, verb: Verb) -> None:
    summary = json.loads((pets / "runs" / "pets" / "summary.json").read_text())
    status, out, _ = verb("evaluate", "runs/pets", "--json")
    found = {each["runtime"]: each for each in json.loads(out)}
    assert status == 0 and [name for name in found if "default" not in name] == ["torch", "onnxruntime", "float"]
    for runtime, stage in (("torch", "qat"), ("onnxruntime", "onnx"), ("float", "float")):
        assert found[runtime]["top1"] == pytest.approx(summary[stage]["top1"], abs=1e-9)
        assert found[runtime]["images"] == summary["val_images"] == 12
    assert found["onnxruntime"]["same_answers"] == summary["onnx"]["agreement"]
    status, out, _ = verb("evaluate", "runs/pets", "--runtime", "onnxruntime,torch", "data.eval_batch_size=5")
    named = [line.split()[0] for line in out.splitlines()[2:] if line and "default session" not in line]
    assert status == 0 and named[:2] == ["onnxruntime", "torch"]
    assert verb("evaluate", "runs/pets", "--runtime", "abacus")[0] == 2


def test_predict_shows_the_best_classes_of_each_picture(pets: Path, verb: Verb) -> None:
    files = [f"images/val/{name}/0.png" for name in ("cat", "ship")]
    status, out, _ = verb("predict", "runs/pets", *files, "--compare", "--top", "2")
    assert status == 0 and all(file in out for file in files)
    status, out, _ = verb("predict", "runs/pets", *files, "--json", "--compare")
    model = qat.load(pets / "runs" / "pets")
    for file, found in zip(files, json.loads(out), strict=True):
        with torch.no_grad():
            expected = model(model.transform(pets / file))[0].softmax(0)
        scores = found["scores"]["onnxruntime"]
        assert list(scores) == model.classes
        assert list(scores.values()) == pytest.approx(expected.tolist(), abs=0.02)
        assert found["class"]["onnxruntime"] == max(scores, key=scores.get) and "float" in found["class"]


def test_predict_needs_no_more_than_the_file(pets: Path, verb: Verb, tmp_path: Path) -> None:
    shutil.copy(pets / "runs" / "pets" / "model.onnx", tmp_path / "alone.onnx")
    Image.fromarray(np.zeros((30, 50, 3), np.uint8)).save(tmp_path / "black.png")
    status, alone, err = verb("predict", "alone.onnx", "black.png", place=tmp_path)
    assert status == 0, err
    assert verb("predict", "runs/pets", str(tmp_path / "black.png"))[1].splitlines()[1:] == alone.splitlines()[1:]
    assert (
        "this needs the folder of its run" in verb("predict", "alone.onnx", "black.png", "--compare", place=tmp_path)[2]
    )


def test_export_writes_the_same_integers_again_and_proves_them(pets: Path, verb: Verb, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in (pets / "runs" / "pets").rglob("*") if path.is_file()}
    options = ["--opset", "17", "--input", "photo", "--output", "scores", "--unpacked", "--exact-sums"]
    options += ["--dynamic", "batch,height,width"]
    status, out, err = verb("export", "runs/pets", "--to", str(tmp_path / "other.onnx"), *options)
    graph = onnx.load(tmp_path / "other.onnx")
    assert (status, graph.graph.input[0].name, graph.graph.output[0].name) == (0, "photo", "scores"), err
    assert graph.opset_import[0].version == 17
    assert [axis.dim_param for axis in graph.graph.input[0].type.tensor_type.shape.dim] == [
        "batch",
        "",
        "height",
        "width",
    ]
    status, out, err = verb("export", "runs/pets", "--to", str(tmp_path / "qonnx.onnx"), "--format", "qonnx")
    assert status == 0 and "not proven: ONNX Runtime has no operator" in out, err
    status, out, err = verb("export", "runs/pets", "--to", str(tmp_path / "again.onnx"))
    assert status == 0 and "100.00 % equal predictions" in out, err
    first, second = (onnx.load(path) for path in (pets / "runs" / "pets" / "model.onnx", tmp_path / "again.onnx"))
    weights = [sorted(each.raw_data for each in proto.graph.initializer) for proto in (first, second)]
    assert weights[0] == weights[1]
    noted = [{each.key: json.loads(each.value) for each in proto.metadata_props} for proto in (first, second)]
    assert (
        noted[0]["state_sha256"]
        == noted[1]["state_sha256"]
        == state_digest(qat.load(pets / "runs" / "pets").state_dict())
    )
    assert noted[0]["classes"] == noted[1]["classes"] and noted[0]["accuracy"]["qat"] == noted[1]["accuracy"]["qat"]
    assert before == {path: path.read_bytes() for path in (pets / "runs" / "pets").rglob("*") if path.is_file()}


def test_benchmark_compares_with_float_in_the_same_runtime(verb: Verb, tmp_path: Path) -> None:
    arguments = ["--batch", "1,3", "--rounds", "1", "--json", str(tmp_path / "x.json")]
    status, out, err = verb("benchmark", "runs/pets", *arguments)
    assert status == 0 and "of float" in out, err
    results = json.loads((tmp_path / "x.json").read_text())
    keys = [(row["model"], row["batch"], row["threads"]) for row in results["rows"] if "default" not in row["model"]]
    assert keys == [("integers", 1, 1), ("float", 1, 1), ("integers", 3, 1), ("float", 3, 1)]
    assert all(row["of_float"] == 1 for row in results["rows"] if row["model"] == "float")
    assert results["bytes"]["float"] > 3 * results["bytes"]["integers"]
    status, out, _ = verb("benchmark", "runs/pets/model.onnx", "--batch", "2", "--rounds", "1")
    assert status == 0 and "float" not in out.splitlines()[2]
    assert verb("benchmark", "runs/pets", "--batch", "0")[0] == 2


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_default_session_has_a_row_where_it_is_not_exact(
    runtime: str, verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(runtime)
    options = ["--batch", "2", "--rounds", "1", "--runtime", runtime, "--json", str(tmp_path / "x.json")]
    for kind, rows in (("vnni", ["integers"]), ("no-vnni", ["integers", "integers, default session"])):
        monkeypatch.setenv("QAT_PROCESSOR", kind)
        status, out, err = verb("benchmark", "runs/pets", *options)
        results = json.loads((tmp_path / "x.json").read_text())
        assert status == 0 and [row["model"] for row in results["rows"]] == [*rows, "float"], err
        assert (f"{results[runtime]}, " in out) and ("(no VNNI)" in out) == (kind == "no-vnni")
        shares = {row["model"]: row["agreement"] for row in results["rows"]}
        saturated = runtime == "onnxruntime"  # whose default session the tests let saturate: answers are turned around
        assert (shares.pop("integers, default session", 1.0) > 0.5) is not (saturated and kind == "no-vnni")
        assert set(shares.values()) == {None}
        status, out, err = verb("evaluate", "runs/pets", "--runtime", runtime, "--json")
        assert [each["runtime"] for each in json.loads(out)] == [row.replace("integers", runtime) for row in rows]
        assert verb("benchmark", "runs/pets/model.onnx", *options[:-2])[0] == 0


def test_a_file_of_one_batch_size_is_measured_at_that(pets: Path, verb: Verb, tmp_path: Path) -> None:
    proto = onnx.load(pets / "runs" / "pets" / "model.onnx")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(proto, tmp_path / "one.onnx")
    for runtime in ("onnxruntime", "openvino"):
        given = ("benchmark", str(tmp_path / "one.onnx"), "--rounds", "1", "--runtime", runtime)
        status, out, err = verb(*given)
        sizes = {line.split()[-4] for line in out.splitlines() if line.startswith("integers")}
        assert (status, sizes) == (0, {"1"}), err
        status, out, err = verb(*given, "--batch", "1,16")
        assert (status, out) == (2, "")
        assert err == f"--batch: {tmp_path / 'one.onnx'} takes batches of 1 alone; leave --batch out\n"


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_files_that_are_no_such_model_are_a_sentence(runtime: str, verb: Verb, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    text = '<ir_version: 10, opset_import: ["": 21]> g (int64[N, 7] ids) => (int64[N, 7] y) { y = Identity(ids) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "tokens.onnx")
    for name, said in {
        "broken": "does not open it: ",
        "tokens": "takes 2-D int64; this is for files of one input of images, 4-D float32 or uint8",
    }.items():
        status, out, err = verb("benchmark", str(tmp_path / f"{name}.onnx"), "--runtime", runtime)
        assert (status, out) == (2, "") and said in err and len(err.splitlines()) == 1, err


def test_the_picture_of_a_benchmark_says_what_it_needs(
    verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--batch", "1", "--rounds", "1", "--plot", str(tmp_path / "x.png")]
    status, _, err = verb("benchmark", "runs/pets/model.onnx", *arguments)
    assert (status, err) == (2, "--plot: needs matplotlib; pip install matplotlib, or leave --plot out\n")


PAGE = (Path(qat.__file__).parents[1] / "docs" / "run_folder.md").read_text().splitlines()
COMMANDS = {line.split()[3]: line.split()[3:] for line in PAGE if line.startswith("python -m qat ")}


def test_the_page_names_every_verb() -> None:
    assert sorted(["train", *COMMANDS]) == sorted(VERBS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_of_the_page_run(name: str, pets: Path, verb: Verb, tmp_path: Path) -> None:
    """docs/run_folder.md's, on a run of the name that it uses, and a picture."""
    shutil.copytree(pets / "runs" / "pets", tmp_path / "pets-2")
    words = [word.replace("pets.onnx", str(tmp_path / "pets.onnx")) for word in COMMANDS[name]]
    words = [word.replace("runs/pets-2", str(tmp_path / "pets-2")) for word in words]
    if "photo.png" in words:
        words[words.index("photo.png")] = "images/val/cat/0.png"
    status, out, err = verb(*words, *(["--rounds", "1"] if words[0] == "benchmark" else []))
    assert status == 0 and out, err


def test_train_is_train_py(pets: Path, verb: Verb) -> None:
    status, out, _ = verb("train", "--config", "pets.yaml", "run_dir=runs/pets", "resume=auto")
    assert status == 0 and "this run is finished" in out
    status, _, err = verb("train", "--config", "pets.yam")
    assert status == 2 and err.startswith("config 'pets.yam': not found in ")


def test_a_file_that_takes_pixels_serves_all_verbs(pets: Path, verb: Verb, tmp_path: Path) -> None:
    path = str(tmp_path / "pixels.onnx")
    status, out, err = verb("export", "runs/pets", "--to", path, "--pixels")
    assert status == 0 and "ONNX Runtime, from pixels: 100.00 % of 12 predictions are equal" in out, err
    picture = "images/val/dog/1.png"
    assert verb("predict", path, picture)[1] == verb("predict", "runs/pets", picture)[1]
    assert verb("benchmark", path, "--batch", "1", "--rounds", "1")[0] == 0


def test_a_file_that_answers_otherwise_is_not_proven(
    verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, write = {"normalization": ([0.1] * 3, [0.9] * 3)}, qat.export_onnx
    monkeypatch.setattr(qat, "export_onnx", lambda *args, **options: write(*args, **{**options, **other}))
    status, out, err = verb("export", "runs/pets", "--to", str(tmp_path / "pixels.onnx"), "--pixels")
    assert status == 1 and "predictions are equal; what differs is not rounding" in out, err


def test_openvino_answers_too(pets: Path, verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second runtime of the same file: it rounds and adds its own way, but to the same scores within a few levels."""
    pytest.importorskip("openvino")
    status, out, err = verb("evaluate", "runs/pets", "--runtime", "onnxruntime,openvino", "--json")
    found = {each["runtime"]: each for each in json.loads(out)}
    assert status == 0 and [name for name in found if "default" not in name] == ["onnxruntime", "openvino"], err
    assert found["openvino"]["same_answers"] == 1
    picture = ("images/val/cat/0.png", "--json", "--runtime")
    scores = [
        json.loads(verb("predict", "runs/pets", *picture, runtime)[1])[0]["scores"][runtime]
        for runtime in ("onnxruntime", "openvino")
    ]
    assert list(scores[0].values()) == pytest.approx(list(scores[1].values()), abs=0.02)
    monkeypatch.setattr(runtimes, "_core", runtimes._core.__wrapped__)
    monkeypatch.setitem(sys.modules, "openvino", None)
    status, _, err = verb("evaluate", "runs/pets", "--runtime", "openvino")
    assert (status, err) == (2, "--runtime: openvino is not installed; pip install openvino\n")
