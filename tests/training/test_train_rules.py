"""train.py with rules and data sets of a user's module; annealed rules, scales per group, learned bit-widths."""

from pathlib import Path

import pytest
import torch

from qat.quantizer import registry
from tests.runs import small_run
from tests.runs.small_run import refusal, start, summary
from tests.runs.tiny_training import Captured, Patch, curves

OWN_RULES = """
import qat
import torch
from qat.functional import floor_ste, lsq_quantize

@qat.register_quantizer("my_lsq")
class MyLSQ(qat.Quantizer):
    def quantize(self, x):
        return lsq_quantize(x, self.grid()[0], *self.bounds())

@qat.register_quantizer("falls_over")
class FallsOver(qat.Quantizer):
    def quantize(self, x):
        raise KeyError("oh")

@qat.register_quantizer("off_its_grid")
class OffItsGrid(qat.Quantizer):
    def quantize(self, x):
        return lsq_quantize(x, self.grid()[0], *self.bounds()) * 1.5

@qat.register_quantizer("of_two_shapes")
class OfTwoShapes(qat.Quantizer):
    def quantize(self, x):
        return x.sum(0)

@qat.register_quantizer("to_nan")
class ToNaN(qat.Quantizer):
    roles = ("activation",)
    def quantize(self, x):
        return x * float("nan")

@qat.register_quantizer("half_up")
class HalfUp(qat.Quantizer):
    def quantize(self, x):
        scale, zero_point = self.grid()
        return (self.compute_codes(x) - zero_point) * scale
    def compute_codes(self, x):
        scale, zero_point = self.grid()
        return torch.clamp(floor_ste(x / scale + 0.5) + zero_point, *self.bounds())
"""
OWN_DATA = """
import torch
from torch import nn

from qat.training.data.images import Dataset, ImageArray

def split(count):
    labels = torch.arange(count) % 2
    noise = torch.randint(0, 40, (count, 1, 8, 8), generator=torch.Generator().manual_seed(count))
    return ImageArray((noise + 200 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)

def bright_or_dark(config):
    assert config.root == "somewhere"
    return Dataset(split(64), split(32), ["dark", "bright"])

def tiny(num_classes):
    head = nn.Linear(4, num_classes)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

def pair(config):
    return split(64), split(32)

def missing(config):
    return open(config.root)
"""
FILES = {**small_run.FILES, "own_rules.py": OWN_RULES, "my_data.py": OWN_DATA}


@pytest.fixture(autouse=True)
def rules_of_one_test(monkeypatch: Patch) -> None:
    monkeypatch.setattr(registry, "_QUANTIZERS", dict(registry._QUANTIZERS))


def run(*arguments: str) -> int:
    return start("run_dir=run", "watch=scales", *arguments)


def test_a_users_rule_and_an_annealed_one_are_trained_and_exported(folder: Path) -> None:
    own, annealed = "quantization.weight.rule=my_lsq", "quantization.activation.rule=stacked_sigmoid"
    assert run("imports=[own_rules]", own, annealed, "quantization.weight.bits=4") == 0
    assert summary(folder / "run")["onnx"]["agreement"] == 1.0
    assert "my_lsq" in (folder / "run" / "layers.txt").read_text()
    temperatures = [value for _, value in curves(folder / "run")["qat/train/quantizer_temperature/0_quantizer"]]
    assert 5 < temperatures[0] < temperatures[-1] == 100


def test_scales_per_group_train_in_channels_last_and_are_not_exported(folder: Path, capsys: Captured) -> None:
    groups = ["quantization.weight.granularity=group", "quantization.weight.group_size=4", "qat.epochs=1"]
    groups += ["quantization.overrides.0.weight.granularity=channel"]
    assert run(*groups) == 2
    assert "quantization: '4.weight_quantizer' has a scale per group of 4 inputs" in capsys.readouterr().err
    assert run(*groups, "export.onnx=false") == 0
    assert "per group of 4" in (folder / "run" / "layers.txt").read_text()


def test_learned_bits_fall_and_the_table_shows_them(folder: Path) -> None:
    learned = ["quantization.weight.rule=learned_bits", "quantization.weight.options.cost=3e5", "qat.epochs=1"]
    assert run(*learned, "qat.quantizer_lr_factor=1.0") == 0
    table = (folder / "run" / "layers.txt").read_text()
    assert "bits in force" in table and "8 bits in force" not in table
    last = {tag: points[-1][1] for tag, points in curves(folder / "run").items()}
    # The loss that is drawn is the task's: a penalty of several hundred does not show in it.
    assert last["qat/train/penalty_loss"] > 100 > 10 > last["qat/train/loss"]
    assert last["qat/train/quantizer_bits/4.weight_quantizer"] < 7.5


def test_ewgs_finds_its_delta_from_the_hessian(folder: Path) -> None:
    assert run("quantization.weight.ewgs=hessian", "quantization.weight.bits=4", "qat.epochs=2") == 0
    deltas = [tag for tag in curves(folder / "run") if "quantizer_ewgs_delta/" in tag]
    assert deltas == [f"qat/train/quantizer_ewgs_delta/{layer}.weight_quantizer" for layer in (0, 4, 8)]
    state = torch.load(folder / "run" / "last.pt", weights_only=True)["model"]
    assert sum(float(state[f"{layer}.weight_quantizer.ewgs_delta"]) for layer in (0, 4, 8)) > 0


def test_a_finished_float_stage_continues_with_another_quantization(folder: Path) -> None:
    refused = ["quantization.activation.symmetric=true", "float.epochs=1", "qat.epochs=1"]
    assert run(*refused) == 2  # the images go below zero
    weights = (folder / "run" / "last.pt").read_bytes()
    assert run(*refused, "resume=auto", "quantization.activation.signed=true") == 0
    assert (folder / "run" / "last.pt").read_bytes() != weights


def data_set(name: str) -> str:
    return f"data={{name: 'my_data:{name}', root: somewhere, image_size: 8, batch_size: 16}}"


def test_a_run_trains_and_exports_on_a_data_set_of_ones_own(folder: Path) -> None:
    assert run(data_set("bright_or_dark"), "model.name='my_data:tiny'", "float.lr=0.1", "qat.epochs=1") == 0
    found = summary(folder / "run")
    assert found["qat"]["top1"] == found["onnx"]["top1"] == 100.0


@pytest.mark.parametrize(("arguments", "facts"), [
    ([data_set("pair")], ("data.name", "returned tuple; it must return a qat.training.data.images.Dataset")),
    ([data_set("missing")], ("data.name", "failed (FileNotFoundError: ", "'somewhere', {folder}/my_data.py:")),
    (["imports=[no_such_rules]"], ("imports[0]: no module 'no_such_rules'", "'{folder}'")),
    (["imports=[own_rules]", "quantization.weight.rule=falls_over"],
     ("0.weight_quantizer: the rule 'falls_over' failed (KeyError: 'oh', {folder}/own_rules.py:14)",)),
    (  # point 34: these three
        ["imports=[own_rules]", "quantization.weight.rule=of_two_shapes"],
        ("0.weight_quantizer: the rule 'of_two_shapes' failed (ValueError: OfTwoShapes.quantize: x is float32 (",),
    ),
    (["imports=[own_rules]", "quantization.activation.rule=to_nan"],
     ("input_quantizer: the rule 'to_nan' failed (NotFiniteError: the values hold NaN or infinity",)),
    (["quantization.weight.rule=to_nan"], ("unknown quantizer 'to_nan'; ", "(in a config: imports)")),
    (["imports=[own_rules]", "quantization.weight.rule=off_its_grid"],
     ("'0.weight_quantizer': the rule 'off_its_grid' computes other values", "export.onnx=false")),
    (["imports=[own_rules]", "quantization.activation.rule=half_up"],
     ("'input_quantizer': the rule 'half_up' has other integers than", "export.onnx=false")),
])  # fmt: skip
def test_mistakes_are_one_sentence_before_any_training(
    folder: Path, capsys: Captured, arguments: list[str], facts: tuple[str, ...]
) -> None:
    said = refusal(capsys, "run_dir=run", "watch=scales", *arguments)
    assert all(fact.format(folder=folder) in said for fact in facts)
