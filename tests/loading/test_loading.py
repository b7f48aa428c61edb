"""`qat.load`: the model of a run, as it was evaluated, wherever its folder lies now; and docs/run_folder.md is true."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import pil_to_tensor

import qat
from qat.quantizer import Quantizer
from qat.training.data.images import InputTransform
from qat.training.data.loaders import load_data
from qat.training.data.transforms import Preprocessing
from qat.training.loop.evaluation import evaluate
from qat.training.run.checkpoint import load_checkpoint
from tests.runs.finished_runs import in_place

CPU = torch.device("cpu")


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def loss_of(model: Any) -> float:
    data = load_data(model.config.data, model.config.seed, CPU, channels_last=True)
    return evaluate(model, data.val, CPU).loss


def changed(path: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint whose payload is changed."""
    payload = torch.load(path, weights_only=True)
    change(payload)
    torch.save(payload, to)
    return to


def refusal(path: Any, *arguments: Any) -> str:
    with pytest.raises(ValueError) as raised:
        qat.load(path, *arguments)
    assert raised.value.__cause__ is None and raised.value.__context__ is None
    return str(raised.value)


@pytest.mark.parametrize("file", ["", "last.pt", "best.pt"])
def test_the_model_is_the_one_that_was_evaluated(own: Path, tiny: Callable[..., nn.Module], file: str) -> None:
    run = own / "runs" / "own"
    model: Any = qat.load(run / file, tiny())
    found = load_checkpoint(run / (file or "last.pt"))["evaluation"]
    assert loss_of(model) == found["loss"] and model.accuracy == found["top1"]
    if not file:
        assert found["loss"] == summary(run)["qat"]["loss"]
    assert not any(module.training for module in model.modules())
    assert model.classes == [str(digit) for digit in range(10)]
    # With averages, last.pt holds other weights for the training to go on with.
    trained = load_checkpoint(run / "last.pt")["model"]["5.weight"]
    assert not torch.equal(model.state_dict()["5.weight"], trained)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_loads_where_no_gradients_are_recorded(own: Path, tiny: Callable[..., nn.Module], mode: Any) -> None:
    with mode():
        model: Any = qat.load(own / "runs" / "own", tiny())
    model(torch.randn(2, 3, 12, 12)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_moved_folder_needs_neither_the_data_nor_files_of_weights(
    pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "moved"
    shutil.copytree(pets / "runs" / "pets", there)
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state()
    model: Any = qat.load("moved")
    assert torch.equal(torch.get_rng_state(), before)
    image = pets / "images" / "val" / "dog" / "1.png"
    expected = qat.load(pets / "runs" / "pets")(model.transform(image))
    assert torch.equal(model(model.transform(str(image))), expected)

    monkeypatch.setattr("torch.hub.get_dir", lambda: pytest.fail("looks for weights"))
    for weights in ({"checkpoint": "gone.pt"}, {"weights": "DEFAULT"}):
        file = changed(there / "last.pt", tmp_path / "x.pt", lambda payload: payload["config"]["model"].update(weights))  # noqa: B023
        assert torch.equal(qat.load(file)(model.transform(image)), expected)


def test_no_code_is_imported_because_a_file_names_it(
    own: Path, tiny: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(own)
    file = own / "runs" / "own" / "last.pt"
    assert refusal(own / "runs" / "own") == (
        f"load: {file}: its model is your own, 'tinymodels:tiny', and no code is imported because a file names it;"
        " pass the float model, qat.load(path, float_model=...)"
    )
    assert "tinymodels" not in sys.modules

    def with_rule(payload: dict[str, Any]) -> None:
        payload["config"]["imports"] = ["tinymodels"]
        payload["config"]["quantization"]["weight"]["rule"] = "mine"

    said = refusal(changed(file, tmp_path / "x.pt", with_rule), tiny())
    assert said.startswith(f"load: {tmp_path}/x.pt: quantization.weight.rule: unknown quantizer 'mine'; registered: ")
    assert said.endswith(
        "; the run imported tinymodels: import that first (python -m qat VERB RUN --import tinymodels), for no code is"
        " imported because a file names it"
    )
    assert "tinymodels" not in sys.modules
    said = refusal(file, nn.Linear(3, 2))
    assert said.startswith("load: ") and "\n" not in said


def test_the_calibrated_model_and_the_float_model(own: Path, tiny: Callable[..., nn.Module], tmp_path: Path) -> None:
    assert in_place(own, "--config", "own.yaml", f"run_dir={tmp_path}/x", "qat.epochs=0") == 0
    found = summary(tmp_path / "x")
    model: Any = qat.load(tmp_path / "x", tiny())
    assert loss_of(model) == found["qat"]["loss"] and model.accuracy == found["qat"]["top1"]
    float_model: Any = qat.load(tmp_path / "x" / "last.pt", tiny())
    assert not any(isinstance(module, Quantizer) for module in float_model.modules())
    assert loss_of(float_model) == found["float"]["loss"]
    (tmp_path / "x" / "best.pt").unlink()
    assert refusal(tmp_path / "x", tiny()).startswith(f"load: '{tmp_path}/x' has no best.pt, whose weights its model.o")


def test_paths_without_a_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04garbage")
    assert refusal(tmp_path / "x.pt").endswith(
        "damaged or of another program; give a run folder, its best.pt or its last.pt"
    )
    assert refusal(tmp_path) == f"load: '{tmp_path}' has no config.yaml; give the folder of a run of train.py"
    monkeypatch.chdir(tmp_path)
    assert refusal("runs/x") == f"load: 'runs/x' does not exist (looked in '{tmp_path}')"


def test_the_model_of_an_unfinished_run_says_so(own: Path, tiny: Callable[..., nn.Module], tmp_path: Path) -> None:
    run = tmp_path / "own"
    shutil.copytree(own / "runs" / "own", run)
    (run / "summary.json").unlink()
    changed(run / "last.pt", run / "last.pt", lambda payload: payload.update(epochs=1))
    with pytest.warns(UserWarning) as warned:
        qat.load(run, tiny())
    (said,) = [str(each.message) for each in warned]
    assert said.endswith("the run is not finished; last.pt has the quantized model after epoch 1 of 2, stage qat")
    assert warned[0].filename.endswith("test_loading.py")


def test_an_attribute_of_the_model_stays(own: Path, tiny: Callable[..., nn.Module], tmp_path: Path) -> None:
    given: Any = tiny()
    given.config = "mine"

    def in_float(payload: dict[str, Any]) -> None:
        payload.update(stage="float", state=None, statistics=None, model=tiny().state_dict())

    model: Any = qat.load(changed(own / "runs" / "own" / "last.pt", tmp_path / "x.pt", in_float), given)
    assert model.config == "mine" and len(model.classes) == 10


@pytest.mark.parametrize("resized_by", ["pillow", "torch"])
def test_every_form_of_a_picture_gives_the_same_input(resized_by: Any, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "x.png")
    kept = Preprocessing(32, 36, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), resized_by=resized_by)
    transform = pickle.loads(pickle.dumps(InputTransform(kept)))
    expected = kept.apply(image if resized_by == "pillow" else pil_to_tensor(image))[None]
    assert expected.shape == (1, 3, 32, 32) and expected.dtype == torch.float32
    for form in (tmp_path / "x.png", str(tmp_path / "x.png"), image, pixels, torch.from_numpy(pixels).permute(2, 0, 1)):
        assert torch.equal(transform(form), expected)
    grey = transform(pixels[:, :, 0])
    assert torch.equal(grey, transform(np.repeat(pixels[:, :, :1], 3, axis=2)))
    assert torch.equal(grey, transform(Image.fromarray(pixels[:, :, 0])))


def test_wrong_pictures_are_refused_with_a_sentence(tmp_path: Path) -> None:
    transform = InputTransform(Preprocessing(32, 32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)))
    (tmp_path / "x.png").write_text("no image")
    wrong: list[tuple[Any, str]] = [
        (tmp_path / "x.png", f"'{tmp_path}/x.png' is not a readable image (no known format)"),
        (tmp_path / "y.png", f"'{tmp_path}/y.png' does not exist"),
        (Image.new("I;16", (40, 40)), "the image has pixels of mode 'I;16'"),
        (np.zeros((3, 40, 40), np.uint8), "got uint8 (3, 40, 40)"),
        (np.zeros((40, 40, 3)), "got float64 (40, 40, 3)"),
        (torch.zeros(3, 40, 40), "got torch.float32 (3, 40, 40)"),
        (torch.zeros(2, 3, 40, 40, dtype=torch.uint8), "got torch.uint8 (2, 3, 40, 40)"),
    ]
    for picture, fact in wrong:
        with pytest.raises(ValueError, match=r"^transform: ") as raised:
            transform(picture)
        assert fact in str(raised.value)
    with pytest.raises(TypeError, match=r"^transform: expected a path, a PIL image, or a uint8 array or tensor, got i"):
        transform(3)  # type: ignore[arg-type]


ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "run_folder.md").read_text()
WITH_TORCH, WITHOUT_TORCH, EXPLAINED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SAVED = """
import sys
assert "torch" not in sys.modules and "qat" not in sys.modules
np.savez("seen.npz", input=transform(Image.open("photo.png")), scores=scores)
"""


@pytest.fixture
def place(pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the run, where the test stands, and an image of the validation split."""
    shutil.copytree(pets / "runs", tmp_path / "runs")
    shutil.copyfile(pets / "images" / "val" / "dog" / "2.png", tmp_path / "photo.png")
    shutil.copyfile(pets / "pets.yaml", tmp_path / "pets.yaml")
    (tmp_path / "images").symlink_to(pets / "images")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_same_prediction_with_torch_and_without(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session: dict[str, object] = {}
    exec(compile(WITH_TORCH, "run_folder.md", "exec"), session)
    named = capsys.readouterr().out
    assert len(WITH_TORCH.strip().splitlines()) == 5  # the import, a blank line, and three lines
    assert named.strip() in ("cat", "dog", "ship")

    (place / "predict.py").write_text(WITHOUT_TORCH + SAVED)
    shown = subprocess.run([sys.executable, "predict.py"], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (0, named), shown.stderr
    seen = np.load("seen.npz")

    model = session["model"]
    config = model.config  # type: ignore[attr-defined]
    data = load_data(config.data, config.seed, torch.device("cpu"), channels_last=True)
    validated = torch.cat([images for images, _ in data.val])[6:7]  # cat has 4 images, and dog 2 before this one
    for tensor in (torch.from_numpy(seen["input"]), model.transform("photo.png")):  # type: ignore[attr-defined]
        assert torch.equal(tensor, validated)
    torch.testing.assert_close(torch.from_numpy(seen["scores"]), session["scores"], rtol=0, atol=1e-4)


def test_differences_are_explained(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXPLAINED, "run_folder.md", "exec"), {"qat": qat})
    assert capsys.readouterr().out.endswith(" of 64 predictions differ, 0 of them without a near-tie\n")


def test_the_metadata_are_those_of_the_page_and_of_the_summary(place: Path) -> None:
    found = {each.key: json.loads(each.value) for each in onnx.load("runs/pets/model.onnx").metadata_props}
    (rows,) = re.findall(r"\| key of the metadata \|.*?\n\n", PAGE, re.DOTALL)
    keys = [key for cell in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for key in re.findall(r"`(\w+)`", cell)]
    assert set(keys) == found.keys() and len(keys) == len(found)
    assert found["classes"] == ["cat", "dog", "ship"] and found["model"] == "squeezenet1_1"
    assert (found["image_size"], found["resize_size"], found["resized_by"]) == (48, 52, "pillow")
    summary = json.loads(Path("runs/pets/summary.json").read_text())
    assert {**summary["about"], "versions": summary["versions"]}.items() <= found.items()
    assert found["accuracy"] == {name: summary[name]["top1"] for name in ("float", "calibrated", "qat")}
    assert (found["weights"], found["epoch"], found["epochs"]) == ("last", 3, 3)
    assert torch.load("runs/pets/best.pt", weights_only=True)["about"]["versions"]["qat"] == qat.__version__
