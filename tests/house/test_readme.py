"""The README and pages of docs are true: their Python runs, commands run (shortened), links and tables are real."""

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import yaml

import qat
from benchmarks.document import DOCUMENTS, with_tables
from qat.export.onnxruntime.verification import optimized_operators
from qat.quantizer import registry
from qat.training.config.schema import RunConfig
from qat.training.loop.preparation import build_recipe

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BASH_LINES = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
# Random weights, so the statistics of BatchNorm stay as calibration saw them: else scales collapse in two steps.
SHORT = [
    "float.epochs=0", "qat.epochs=1", "qat.lr=1e-6", "qat.freeze_bn_epoch=0", "data.limit_train=32",
    "data.limit_val=16", "data.batch_size=16", "quantization.calibration_batches=1",
]  # fmt: skip


def run_blocks(page: str, names: dict[str, Any]) -> Iterator[str]:
    """Run the Python of a page from top to bottom, and yield each block when it has run."""
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        exec(compile(block, page, "exec"), names)
        yield block


def test_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_QUANTIZERS", dict(registry._QUANTIZERS))  # the README registers a rule
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(list(run_blocks("README.md", {}))) == 5
    assert (tmp_path / "model.onnx").stat().st_size > 1_000_000
    operators = optimized_operators(tmp_path / "net.onnx")
    assert (operators["QLinearConv"], operators["QGemm"]) == (2, 1) and not {
        "Conv",
        "FusedConv",
        "Gemm",
    } & operators.keys()


def train_lines() -> list[str]:
    return [line[line.index("python train.py") :] for line in BASH_LINES if "python train.py" in line]


@pytest.mark.parametrize("line", train_lines())
def test_training_commands_run(tmp_path: Path, line: str) -> None:
    (tmp_path / "runs").mkdir()
    words = [word for word in line.split()[1:] if not word.startswith("qat.epochs")]
    command = [sys.executable, str(ROOT / words[0]), *words[1:], *SHORT]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert list(tmp_path.glob("runs/*/summary.json"))


def test_the_distribution_has_another_name_than_the_import() -> None:
    (name,) = re.findall(r'^name = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert name != "qat" and f"called `{name}`" in README  # `pip install qat` is another package


def test_other_commands_are_the_known_ones() -> None:
    others = [line for line in BASH_LINES if "python train.py" not in line]
    assert others == ["tensorboard --logdir runs", 'pip install -e ".[test]" && python -m pytest']
    assert BASH_LINES[0] == "pip install -e . && python train.py --config resnet_int8.yaml"
    assert others[1].replace(".[test]", r"\.\[test\]") in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_are_the_measured_ones(name: str) -> None:
    document = (ROOT / name).read_text()
    assert document.count("<!-- table: ") == document.count("<!-- end -->") > 0
    assert with_tables(document) == document


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_the_rules_page_is_true() -> None:
    page = (ROOT / "docs" / "rules.md").read_text()
    assert list(run_blocks("docs/rules.md", {}))
    (section,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    config = RunConfig.model_validate(yaml.safe_load(section))
    recipe = build_recipe(config.quantization)
    assert (recipe.weight.rule, recipe.activation.rule) == ("dsq", "pact")
    assert recipe.for_layer("conv1").weight.rule == "lsq"
    qat.prepare(torchvision.models.resnet18(), recipe)


def test_the_models_page_runs_and_says_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    skipped = "encoder.layers.encoder_layer_0.self_attention.query_projection"
    for block in run_blocks("docs/models.md", names):
        if "dry_run" in block:
            table = capsys.readouterr().out
            assert skipped in table and "stays float" in table
    parts_and_features = "['backbone', 'head']\n{'c3': torch.Size([2, 128, 8, 8]), 'c4': torch.Size([2, 256, 4, 4])}\n"
    assert parts_and_features in capsys.readouterr().out
    model = names["model"]
    assert f"{skipped}  " in qat.summary(model)
    assert not hasattr(model.get_submodule(skipped.rpartition(".")[0]), "query_projection")
    layers = ("conv_proj", "heads.head", "encoder.layers.encoder_layer_0.mlp.0")
    assert [model.get_submodule(layer).weight_quantizer.spec.bits for layer in layers] == [8, 8, 4]


def test_the_training_loop_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    names: dict[str, Any] = {}
    assert len(list(run_blocks("docs/training_loop.md", names))) == 8
    assert (tmp_path / "model.onnx").exists()
    assert not any(module.is_frozen for module in names["model"].modules() if isinstance(module, qat.Quantizer))
    assert (names["in_float"] - names["model"](names["images"])).abs().max() > 0
    sketches = re.findall(r"```python sketch\n(.*?)```", (ROOT / "docs/training_loop.md").read_text(), re.DOTALL)
    assert [compile(sketch, "sketch", "exec") for sketch in sketches]


def test_every_shipped_config_is_listed() -> None:
    shipped = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert shipped == set(re.findall(r"^\| `(\w+\.yaml)` \| [^|]+ \| [^|]+ \|$", README, re.MULTILINE))
