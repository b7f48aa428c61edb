"""Config files and overrides: how they are read, and the sentences for their errors."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from qat.recipe import QuantRecipe
from qat.targets import PROFILES
from qat.training import script
from qat.training.config.file import dump_config, load_config
from qat.training.config.schema import WITHOUT_FILES, RunConfig
from qat.training.model import build_recipe
from qat.training.script import CONFIGS
from tests.runs.tiny_training import user_error

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(file.name for file in (ROOT / "configs").glob("*.yaml"))
pytestmark = pytest.mark.usefixtures("folder")


def load(text: str, *overrides: str) -> RunConfig:
    Path("r18.yaml").write_text(text, encoding="utf-8")
    return load_config("r18.yaml", overrides)


def problems(text: str, *overrides: str) -> list[str]:
    return user_error(load, text, *overrides).split("\n")


# The shipped configs


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_a_recipe_and_survives_a_round_trip_through_yaml(name: str) -> None:
    config = load_config(name, config_folder=CONFIGS)
    assert config.name == Path(name).stem and f"| `{name}` |" in (ROOT / "docs" / "config.md").read_text()
    text = dump_config(config)
    Path("resolved.yaml").write_text(text, encoding="utf-8")
    assert load_config("resolved.yaml") == config
    assert RunConfig.model_validate(yaml.safe_load(text)) == config  # other readers of YAML see the same
    recipe, grids = build_recipe(config.quantization), config.quantization
    assert (recipe.weight.bits, recipe.activation.bits) == (grids.weight.bits, grids.activation.bits)


SMALL = "data.batch_size=4 data.eval_batch_size=4"
FAKE = "data.name=fake data.root=null data.download=false data.image_size=32 data.resize_size=null model.weights=null"
NEVER_SLOW = ("digits_detection_w4a4.yaml", "digits_segmentation_w4a4.yaml")


@pytest.mark.parametrize("name", [
    pytest.param(each, marks=[] if each in NEVER_SLOW else pytest.mark.slow) for each in SHIPPED
])  # fmt: skip
def test_a_dry_run_of_a_shipped_config_says_how_long_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    there = load_config(name, config_folder=CONFIGS).data.name in WITHOUT_FILES
    status = script.main([name, "--dry-run", *SMALL.split(), *([] if there else FAKE.split())])
    said = capsys.readouterr()
    assert (status, said.err) == (0, "") and "\nqat: " in said.out
    assert said.out.endswith(" min in all; calibration, export and proof besides\n")


# Which file


def test_the_current_folder_comes_before_the_config_folder(folder: Path) -> None:
    shipped = folder / "shipped"
    shipped.mkdir()
    (shipped / "a.yaml").write_text("seed: 1")
    (shipped / "b.yml").write_text("seed: 2")
    Path("a.yaml").write_text("seed: 3")
    assert [load_config(name, config_folder=shipped).seed for name in ("a", "a.yaml", "b", "shipped/a")] == [3, 3, 2, 1]


@pytest.mark.parametrize(("path", "facts"), [
    ("resnet_int9", ("{here} and {here}/shipped", "did you mean 'resnet_int8.yaml'?")),
    ("zz.yaml", ("there are: mine.yaml, resnet_int8.yaml",)),
    ("sub/zz.yaml", ("not found in {here}/sub; there are: resnet_int8.yaml",)),
    ("shipped/resnet", ("did you mean 'shipped/resnet_int8.yaml'?",)),
])  # fmt: skip
def test_no_such_file(folder: Path, path: str, facts: tuple[str, ...]) -> None:
    (folder / "shipped").mkdir()
    (folder / "shipped" / "resnet_int8.yaml").write_text("")
    Path("mine.yaml").write_text("")
    said = user_error(load_config, path, config_folder=folder / "shipped")
    assert said.startswith(f"config {path!r}: ") and all(fact.format(here=folder) in said for fact in facts)


def test_a_file_that_is_not_text() -> None:
    Path("r18.yaml").write_bytes(b"seed: \xff")
    assert user_error(load_config, "r18.yaml").startswith("r18.yaml: is not UTF-8 text")


@pytest.mark.parametrize("escaped", [r"\0", r"\e[31m", r"\uD800", r"\x9b"])
@pytest.mark.parametrize("text", ['name: "a{}b"', '"a{}b": 1', 'run_dir: "a{}b"', 'imports: ["a{}b"]'])
def test_text_that_is_no_name(text: str, escaped: str) -> None:
    shown = escaped.replace(r"\0", r"\x00").replace(r"\e", r"\x1b").lower()
    what = f"line 1: 'a{shown}b' has control characters, or is not UTF-8; write it as plain text"
    assert problems(text.format(escaped)) == [f"r18.yaml: {what}"]


# What is read


def test_words_and_numbers() -> None:
    text = """
    name: off
    seed: 1_000
    qat: {lr: 1e-3, weight_decay: 2.5e-4, clip_grad_norm: 1E5, warmup_epochs: 1}
    data: {mean: [0, 5e-1, .5], std: [1., 1, +1.0], download: True, root: ~}
    model: {kwargs: {a: yes, b: 010, c: 1:30, d: 2024-01-01, e: null, f: -3, g: 0x10, h: 1e, i: 1.2.3}}
    """
    config = load(text)
    assert (config.name, config.seed) == ("off", 1000)
    assert (config.qat.lr, config.qat.weight_decay, config.qat.clip_grad_norm) == (0.001, 0.00025, 100000.0)
    assert (config.data.mean, config.data.std, config.data.download) == ((0, 0.5, 0.5), (1, 1, 1), True)
    kept = {"a": "yes", "b": "010", "c": "1:30", "d": "2024-01-01", "e": None, "f": -3, "g": "0x10"}
    assert config.model.kwargs == {**kept, "h": "1e", "i": "1.2.3"}


def test_text_that_looks_like_a_number_survives_the_dump() -> None:
    kwargs = {"a": "1e-3", "b": "true", "c": "010", "d": "", "e": "null", "f": 1e-3, "g": ["~", None, True, "é: #"]}
    config = RunConfig(name="1E5", model={"kwargs": kwargs})
    Path("dumped.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config("dumped.yaml") == config


def test_anchors_and_merges_are_copies() -> None:
    config = load("float: &stage {lr: 0.5, epochs: 2}\nqat: {<<: *stage, epochs: 3}", "qat.lr=0.25")
    assert (config.float.lr, config.float.epochs, config.qat.lr, config.qat.epochs) == (0.5, 2, 0.25, 3)
    config = load("float: &stage {lr: 0.5}\nqat: *stage", "qat.lr=0.25")
    assert (config.float.lr, config.qat.lr) == (0.5, 0.25)


def test_overrides() -> None:
    overrides = [
        "qat.lr=1e-3",
        "qat.lr = 2e-3",  # the later one wins
        "data.mean=[0.5, 0.5, 0.5]",
        "qat.clip_grad_norm=null",
        "device=cuda:1",
        "data.root=a=b",
        "float={epochs: 2}",
        "model.kwargs.width_mult=0.5",
        "model.kwargs.deep.er=x",
        "quantization.overrides.layer1.0.conv1.weight.bits=4",
        "quantization.overrides.layer1.*={skip: true}",
        "quantization.overrides.fc.skip=true",
    ]
    config = load("qat: {clip_grad_norm: 1}\nfloat: {epochs: 1, lr: 0.5}\nname: x", *overrides)
    assert (config.name, config.device, config.data.root) == ("x", "cuda:1", "a=b")
    assert (config.qat.lr, config.qat.clip_grad_norm, config.data.mean) == (0.002, None, (0.5, 0.5, 0.5))
    assert (config.float.epochs, config.float.lr) == (2, 0.1)  # a whole section replaces the file's
    assert config.model.kwargs == {"width_mult": 0.5, "deep": {"er": "x"}}
    patterns = config.quantization.overrides
    assert list(patterns) == ["layer1.0.conv1", "layer1.*", "fc"]
    assert (patterns["layer1.0.conv1"].weight.bits, patterns["layer1.*"].skip, patterns["fc"].skip) == (4, True, True)


# The target's grids


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize(
    "fields", [{"bits": 4}, {"bits": 4, "init": "percentile"}, {"granularity": "tensor", "rule": "power_of_two"}]
)
def test_a_grid_means_the_same_in_yaml_and_in_python(target: str, fields: dict[str, Any]) -> None:
    section = ", ".join(f"{name}: {value}" for name, value in fields.items())
    text = f"quantization: {{target: {target}, weight: {{{section}}}, activation: {{{section}}}}}"
    assert build_recipe(load(text).quantization) == QuantRecipe(fields, fields, target=target)


def test_first_and_last_bits_and_overrides_by_type_reach_the_recipe() -> None:
    text = """
    quantization:
      target: qnnpack
      weight: {bits: 4}
      first_bits: 8
      overrides:
        type:Linear: {weight: {bits: 6}}
        head: {skip: true}
    """
    config = load(text, "quantization.last_bits=7", "quantization.overrides.type:Linear.activation.bits=5")
    recipe = build_recipe(config.quantization)
    assert (recipe.first_bits, recipe.last_bits, list(recipe.overrides)) == (8, 7, ["type:Linear", "head"])
    linear = recipe.for_layer("mlp", nn.Linear)
    assert (linear.weight.bits, linear.activation.bits) == (6, 5)
    assert recipe.for_layer("stem", nn.Conv2d, "first").weight.bits == 8


# What cannot be read: one line each, with the file, the line or key, and the value

BAD_FILES = [
    # not YAML, or not a config
    ("", "expected keys and values, such as data: {name: digits}, got null"),
    ("qat: {lr: 1", "line 1, column 12: not valid YAML: expected ',' or '}'"),
    ("seed: 1\n---\nseed: 2", "line 2, column 1: not valid YAML: but found another document"),
    ("qat: !!python/name:os.system", "line 1, column 6: not valid YAML: could not determine a constructor"),
    ("a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
    ), "it is longer than 1,000,000 characters, aliases (*) written out"),
    ("a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10)
    ), "it is longer than 1,000,000 characters, aliases (*) written out"),
    ("name: " + "x" * 1_000_000, "it is longer than 1,000,000 characters"),
    ("qat: &a {lr: *a}", "not a config: Circular reference"),
    ("qat: {lr: 1}\nseed: 1\n\nqat: {epochs: 2}", "line 4: 'qat' is already set on line 1"),
    ("quantization:\n  overrides:\n    0: {skip: true}", "line 3: the key 0 is not text"),
    # keys
    ("quantization: {weigth: {}}", "quantization.weigth: unknown key; did you mean 'weight'?"),
    ("zzz: 1", "zzz: unknown key; valid keys: name, run_dir, resume, imports, seed"),
    ("epochs: 1", "epochs: unknown key; did you mean 'float.epochs' or 'qat.epochs'?"),
    ("quantization: {overrides: {'layer1.*': {skipp: true}}}", "quantization.overrides.layer1.*.skipp: unknown key; "
     "did you mean 'skip'?"),
    ("qat: {progressive: [{bitts: 4}]}", "qat.progressive[0].bitts: unknown key; did you mean 'bits'?"),
    # types and ranges
    ("qat: {epochs: 3.0}", "qat.epochs: input should be a valid integer, got 3.0"),
    ("data: {mean: [0, 0.5, a]}", 'data.mean[2]: input should be a valid number, got "a"'),
    ("data: {mean: [0.5]}", "data.mean: expected three numbers, one for each channel, such as"),  # point 62
    ("data: {std: 0.5}", "data.std: expected three numbers, one for each channel, such as [0.5, 0.5, 0.5], got 0.5"),
    ("qat: {epochs: -1}", "qat.epochs: input should be greater than or equal to 0, got -1"),
    ("qat: {lr: .nan}", "qat.lr: input should be a finite number, got NaN"),
    # choices
    ("amp: bf61", "amp: input should be 'none', 'bf16' or 'fp16', got \"bf61\"; did you mean 'bf16'?"),
    ("data: {name: cifar}", "data.name: expected digits, imagefolder, cifar10"),
    ("quantization: {target: tensort}", "quantization.target: unknown target 'tensort'; registered: "),
    # several keys together
    ("qat: {distillation: {weight: 0, temperature: 4, features: {fc: 1}}}",
     "qat.distillation: temperature: 4 has no effect with weight: 0"),
    ("qat: {distillation: {features: {fc: 0}}}", "qat.distillation: features: fc: 0 has no effect"),
    ("qat: {progressive: [{}]}", "qat.progressive[0]: it trains as the last stage does"),
    ("qat: {quantizer_lr: 1e-5, quantizer_lr_factor: 0.1}",
     "qat: quantizer_lr: 1e-05 and quantizer_lr_factor: 0.1 are two rates"),
    ("qat: {oscillation: {after: 0.5}}", "qat.oscillation: after: 0.5 has no effect without dampen or freeze"),
    ("qat: {oscillation: {freeze_from: 0.5}}", "qat.oscillation: freeze_from: 0.5 has no effect without freeze"),
    ("qat: {oscillation: {freeze: 0.5}}", "qat.oscillation: freeze: 0.5 must be at most freeze_from: 0.1"),
    ("compile: true\nqat: {quant_noise: {share: 0.5}}", "qat.quant_noise: compiled code does not follow its hooks"),
    ("compile: true\nqat: {distillation: {features: {fc: 1}}}", "qat.distillation.features: compiled code does not"),
    ("qat: {quantizer_optimizer: adamw}", "qat: quantizer_optimizer: 'adamw' beside 'sgd' needs a rate of its own"),
    ("qat: {epochs: 2, warmup_epochs: 2.5}", "qat.warmup_epochs: 2.5 is longer than qat.epochs: 2"),
    ("data: {batch_size: 1}\nfloat: {cutmix_alpha: 1}", "float.cutmix_alpha: 1 mixes images of a batch"),
    ("compile: true\ncuda_graphs: true", "cuda_graphs: true records the model as it is"),
    ("data: {resize_size: 30}", "data.resize_size: 30 is smaller than data.image_size: 32"),
    ("data: {augment: {cutout: 32}}", "data.augment.cutout: 32 leaves little or nothing of images"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "beginning"), BAD_FILES)
def test_a_bad_file(text: str, beginning: str) -> None:
    (said,) = problems(text)
    assert said.startswith(f"r18.yaml: {beginning}")


# The whole line: it begins with the override as typed

BAD_OVERRIDES = [
    ("qat.lr", "qat.lr: expected key.path=value, such as qat.lr=0.01"),
    ("=3", "=3: expected key.path=value, such as qat.lr=0.01"),
    ("qat..lr=3", "qat..lr=3: expected key.path=value, such as qat.lr=0.01"),
    ("seed=[1", "seed=[1: line 1, column 3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("qat={lr: 1, lr: 2}", "qat={lr: 1, lr: 2}: line 1: 'lr' is already set on line 1; keep one of them"),
    ("qat.lr.x=1", 'qat.lr.x=1: qat.lr: input should be a valid number, got {"x": 1}'),
    ("model.kwargs.a.b=1", "model.kwargs.a.b=1: 'model.kwargs.a' is 3, which has no keys of its own"),
    ("data.mean=[1, a, 1]", 'data.mean=[1, a, 1]: data.mean[1]: input should be a valid number, got "a"'),
    (
        "data.resize_size=30",
        "data.resize_size=30: data.resize_size: 30 is smaller than data.image_size: 32, which is cropped from it",
    ),
]


@pytest.mark.parametrize(("override", "line"), BAD_OVERRIDES)
def test_a_bad_override(override: str, line: str) -> None:
    assert problems("model: {kwargs: {a: 3}}", override) == [line]


def test_all_problems_are_reported_at_once_and_the_file_is_blamed_for_its_own_alone() -> None:
    found = problems("seed: a\nqat: {lr: 0, epochs: -1, lrr: 1}", "qat.lr=-1", "qat.lr=-2", "amp=x", "foo.a=1")
    assert sorted(" ".join(line.split(": ")[:2]) for line in found) == [
        "amp=x amp", "foo.a=1 foo", "qat.lr=-2 qat.lr", "r18.yaml qat.epochs", "r18.yaml qat.lrr", "r18.yaml seed"
    ]  # fmt: skip


def test_what_qat_leaves_out_follows_the_bits(tmp_path: Path) -> None:
    def read(*overrides: str) -> RunConfig:
        (tmp_path / "run.yaml").write_text("quantization: {weight: {bits: 2}, activation: {bits: 4}}\n")
        return load_config(str(tmp_path / "run.yaml"), overrides)

    two = read("qat.progressive=[{bits: 8}, {weight: {bits: 3}, lr: 0.1}, {activation: {bits: 3}}]")
    assert (two.qat.optimizer, two.qat.lr) == ("adamw", 0.002)
    assert [stage.lr for stage in two.qat.progressive] == [3.125e-05, 0.1, 0.002]
    (tmp_path / "resolved.yaml").write_text(dump_config(two))
    assert load_config(str(tmp_path / "resolved.yaml")) == two  # and an own choice of bits does not move it
    assert load_config(str(tmp_path / "resolved.yaml"), ["quantization.weight.bits=8"]).qat == two.qat
    for given, found in (
        ("qat.lr=0.3", ("adamw", 0.3)),
        ("qat.optimizer=sgd", ("sgd", 0.01)),
        ("quantization.weight.bits=4", ("adamw", 5e-4)),
        ("quantization={}", ("sgd", 0.01)),
    ):
        assert (read(given).qat.optimizer, read(given).qat.lr) == found, given
    assert read("qat.lr=0.3", "qat.progressive=[{bits: 8}]").qat.progressive[0].lr is None
    assert user_error(read, "qat=3").startswith("qat=3: qat: input should be an object")
