"""Config files and overrides: how they are read, and the sentences for their errors."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from tiny_training import user_error
from torch import nn

from qat.recipe import QuantRecipe
from qat.spec import QuantSpec
from qat.targets import PROFILES
from qat.training.config.error_messages import dotted, sentences_of
from qat.training.config.file import dump_config, load_config
from qat.training.config.schema import RunConfig
from qat.training.errors import UserError
from qat.training.loop.preparation import build_recipe

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(file.name for file in CONFIGS.glob("*.yaml"))
TOP_KEYS = (
    "name, run_dir, resume, imports, seed, device, amp, channels_last, integer_forward, compile, cuda_graphs,"
    " log_every, model, data, float, qat, float_finetune, quantization, export"
)
pytestmark = pytest.mark.usefixtures("folder")


def load(text: str, *overrides: str) -> RunConfig:
    Path("r18.yaml").write_text(text, encoding="utf-8")
    return load_config("r18.yaml", overrides)


def problems(text: str, *overrides: str) -> list[str]:
    return user_error(load, text, *overrides).split("\n")


# The shipped configs


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_stands_in_the_readme(name: str) -> None:
    assert f"| `{name}` |" in (CONFIGS.parent / "README.md").read_text()


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_a_recipe_and_survives_a_round_trip_through_yaml(name: str) -> None:
    config = load_config(name, config_folder=CONFIGS)
    assert config.name == Path(name).stem
    text = dump_config(config)
    Path("resolved.yaml").write_text(text, encoding="utf-8")
    assert load_config("resolved.yaml") == config
    assert RunConfig.model_validate(yaml.safe_load(text)) == config  # other readers of YAML see the same
    recipe, grids = build_recipe(config.quantization), config.quantization
    assert (recipe.weight.bits, recipe.activation.bits) == (grids.weight.bits, grids.activation.bits)


def test_the_default_config_says_what_the_command_promises() -> None:
    config = load_config("resnet_int8", config_folder=CONFIGS)
    assert (config.model.name, config.model.weights, config.data.name, config.seed) == ("resnet18", None, "digits", 0)
    assert (config.quantization.weight.bits, config.quantization.activation.bits) == (8, 8)
    assert config.float.epochs > 0 and config.qat.epochs > 0 and config.export.onnx


def test_w4a4_keeps_the_first_and_the_last_layer_at_8_bits() -> None:
    quantization = load_config("resnet18_cifar10_w4a4", config_folder=CONFIGS).quantization
    assert (quantization.weight.bits, quantization.activation.bits) == (4, 4)
    bits = {name: (layer.weight.bits, layer.activation.bits) for name, layer in quantization.overrides.items()}
    assert bits == {"conv1": (8, 8), "fc": (8, 8)}


# Which file


def test_the_current_folder_comes_before_the_config_folder(folder: Path) -> None:
    shipped = folder / "shipped"
    shipped.mkdir()
    (shipped / "a.yaml").write_text("seed: 1")
    (shipped / "b.yml").write_text("seed: 2")
    Path("a.yaml").write_text("seed: 3")
    assert [load_config(name, config_folder=shipped).seed for name in ("a", "a.yaml", "b", "shipped/a")] == [3, 3, 2, 1]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("resnet_int9", "not found in {here} and {here}/shipped; did you mean 'resnet_int8.yaml'?"),
        ("zz.yaml", "not found in {here} and {here}/shipped; there are: mine.yaml, resnet_int8.yaml"),
        ("sub/zz.yaml", "not found in {here}/sub; there are: resnet_int8.yaml"),
        ("shipped/resnet", "not found in {here}/shipped; did you mean 'shipped/resnet_int8.yaml'?"),
        ("shipped", "is a folder; name a config file in it"),
    ],
)
def test_no_such_file(folder: Path, path: str, sentence: str) -> None:
    (folder / "shipped").mkdir()
    (folder / "shipped" / "resnet_int8.yaml").write_text("")
    Path("mine.yaml").write_text("")
    said = user_error(load_config, path, config_folder=folder / "shipped")
    assert said == f"config {path!r}: {sentence.format(here=folder)}"


def test_no_config_anywhere(folder: Path) -> None:
    assert user_error(load_config, "r18") == f"config 'r18': not found in {folder}; no config lies there"


def test_a_file_that_is_not_text() -> None:
    Path("r18.yaml").write_bytes(b"seed: \xff")
    said = user_error(load_config, "r18.yaml")
    assert said == "r18.yaml: is not UTF-8 text; a config is a YAML file saved as UTF-8"


def test_a_config_of_the_config_folder_is_named_by_its_path(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "a.yaml").write_text("quantization: {weigth: {bits: 4}}")
    said = user_error(load_config, "a", config_folder=folder / "configs")
    assert said == "configs/a.yaml: quantization.weigth: unknown key; did you mean 'weight'?"


# What is read


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n"])
def test_an_empty_file_is_no_config(text: str) -> None:
    assert problems(text) == ["r18.yaml: is empty; name at least a data set, such as data: {name: digits}"]


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


def test_the_global_yaml_readers_are_not_changed() -> None:
    assert yaml.safe_load("[1e-3, off, 010]") == ["1e-3", False, 8]
    assert yaml.safe_dump(["1e-3"]) == "- 1e-3\n"


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
def test_grids_that_the_config_leaves_out_are_the_targets(target: str) -> None:
    profile = PROFILES[target]
    recipe = build_recipe(load(f"quantization: {{target: {target}, activation: {{bits: 4}}}}").quantization)
    assert recipe == QuantRecipe(profile.weight, replace(profile.activation, bits=4), target=profile.name)


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize(
    "fields", [{"bits": 4}, {"bits": 4, "init": "percentile"}, {"granularity": "tensor", "rule": "power_of_two"}]
)
def test_a_grid_means_the_same_in_yaml_and_in_python(target: str, fields: dict[str, Any]) -> None:
    section = ", ".join(f"{name}: {value}" for name, value in fields.items())
    text = f"quantization: {{target: {target}, weight: {{{section}}}, activation: {{{section}}}}}"
    in_yaml = build_recipe(load(text).quantization)
    assert in_yaml == QuantRecipe(fields, fields, target=target)
    assert in_yaml == QuantRecipe(QuantSpec(**fields), QuantSpec(**fields), target=target)


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
    resolved = yaml.safe_load(dump_config(config))["quantization"]
    assert (resolved["target"], resolved["first_bits"], resolved["last_bits"]) == ("qnnpack", 8, 7)
    assert resolved["overrides"]["type:Linear"]["activation"]["bits"] == 5
    Path("resolved.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config("resolved.yaml") == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "quantization: {target: tensorrt, activation: {signed: false}}",
            "quantization: QuantRecipe: an unsigned activation does not run on tensorrt: its INT8 is signed;"
            " use signed=True",
        ),
        (
            "quantization: {target: integer_only, last_bits: 12}",
            "quantization: QuantRecipe: last_bits: an activation of 12 bits does not run on integer_only:"
            " activations are int8; use at most 8 bits",
        ),
        (
            "quantization: {overrides: {'type:': {skip: true}}}",
            "quantization: QuantRecipe: overrides['type:']: the class is missing; write 'type:Linear'",
        ),
    ],
)
def test_a_grid_that_the_target_does_not_run(text: str, sentence: str) -> None:
    assert user_error(build_recipe, load(text).quantization) == sentence


# What cannot be read: the sentence after the file's name

BAD_FILES = [
    # not YAML
    ("qat: {lr: 1", "line 1, column 12: not valid YAML: expected ',' or '}', but got '<stream end>'"),
    ("seed: 1\nqat: a: b", "line 2, column 7: not valid YAML: mapping values are not allowed here"),
    ("qat:\n\tlr: 1", "line 2, column 1: not valid YAML: found a tab (indent with spaces) that cannot start any token"),
    ("seed: 1\n---\nseed: 2", "line 2, column 1: not valid YAML: expected a single document in the stream, "
     "but found another document"),
    ("{{ a }}", "line 1, column 2: not valid YAML: a key must be a single word"),
    ("qat: !!python/name:os.system", "line 1, column 6: not valid YAML: the tag !!python/name:os.system is not known "
     "here"),
    ("seed: 1\nname: \x07", "line 2: character '\\x07' is not allowed in YAML; remove it"),
    ("a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
    ), "it is longer than 1,000,000 characters, aliases (*) written out"),
    ("a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10)
    ), "it is longer than 1,000,000 characters, aliases (*) written out"),
    ("name: " + "x" * 1_000_000, "is longer than 1,000,000 characters; a config is a small YAML file"),
    ("qat: &a {lr: *a}", "an alias (*) stands inside the value that it names; write the value out"),
    ("model: " + "[" * 3000, "nested too deeply to be a config"),
    ("model: {kwargs: {a: " + "[" * 250 + "]" * 250 + "}}", "nested too deeply to be a config"),
    ('name: "\\ud800"', "a \\u escape stands for half a character only; write the character itself"),
    # not a config
    ("- 1\n- a: null", "expected keys and values at the top level, got [1, {a: null}]"),
    ("qat: {lr: 1}\nseed: 1\n\nqat: {epochs: 2}", "line 4: 'qat' is already set on line 1; keep one of them"),
    ("quantization:\n  overrides:\n    0: {skip: true}", "line 3: the key 0 is not text; write it in quotes"),
    # keys
    ("quantization: {weigth: {}}", "quantization.weigth: unknown key; did you mean 'weight'?"),
    ("zzz: 1", f"zzz: unknown key; valid keys: {TOP_KEYS}"),
    ("epochs: 1", "epochs: unknown key; did you mean 'float.epochs' or 'qat.epochs'?"),
    ('"a\\nb": 1', f"'a\\nb': unknown key; valid keys: {TOP_KEYS}"),
    ("quantization: {overrides: {'layer1.*': {skipp: true}}}", "quantization.overrides.layer1.*.skipp: unknown key; "
     "did you mean 'skip'?"),
    # types
    ("qat: {epochs: ten}", "qat.epochs: expected a whole number >= 0, got 'ten'"),
    ("qat: {epochs: '3'}", "qat.epochs: expected a whole number >= 0, got '3'; write it without quotes"),
    ("qat: {epochs: 3.0}", "qat.epochs: expected a whole number >= 0, got 3.0"),
    ("qat: {epochs: true}", "qat.epochs: expected a whole number >= 0, got true"),
    ("qat: {epochs:}", "qat.epochs: expected a whole number >= 0, got null"),
    ("qat: {lr: false}", "qat.lr: expected a number > 0, got false"),
    ("data: {download: yes}", "data.download: expected true or false, got 'yes'"),
    ("data: {download: 1}", "data.download: expected true or false, got 1"),
    ("name: 2024", "name: expected text, got 2024; write it in quotes"),
    ("data: {root: true}", "data.root: expected text or null, got true; write it in quotes"),
    ("qat: 3", "qat: expected a section (epochs, optimizer, lr, momentum, ...), got 3"),
    ("model: {kwargs: [a]}", "model.kwargs: expected a section (key: value), got ['a']"),
    ("data: {mean: [0.5]}", "data.mean: expected a list of 3 numbers or null, got [0.5]"),
    ("data: {std: [1, 2, 3, 4]}", "data.std: expected a list of 3 numbers or null, got [1, 2, 3, 4]"),
    ("data: {std: 1}", "data.std: expected a list of 3 numbers or null, got 1"),
    ("data: {mean: [0, 0.5, a]}", "data.mean[2]: expected a number, got 'a'"),
    # choices
    ("amp: bf61", "amp: expected 'none', 'bf16' or 'fp16', got 'bf61'; did you mean 'bf16'?"),
    ("qat: {optimizer: SGD}", "qat.optimizer: expected 'sgd' or 'adamw', got 'SGD'; did you mean 'sgd'?"),
    ("resume: off", "resume: expected 'never' or 'auto', got 'off'"),
    ("quantization: {target: tensort}", "quantization.target: unknown target 'tensort'; registered: "
     f"{', '.join(PROFILES)}; did you mean 'tensorrt'?"),
    ("quantization: {overrides: {type: Linear}}", "quantization.overrides.type: expected a section (weight, "
     "activation, skip), got 'Linear'"),
    ("quantization: {weight: {granularity: per_channel}}", "quantization.weight.granularity: expected 'tensor', "
     "'channel', 'group' or null, got 'per_channel'; did you mean 'channel'?"),
    # ranges
    ("qat: {epochs: -1}", "qat.epochs: expected a whole number >= 0, got -1"),
    ("qat: {lr: 0}", "qat.lr: expected a number > 0, got 0"),
    ("qat: {lr: .nan}", "qat.lr: expected a number > 0, got .nan, which is not finite"),
    ("qat: {clip_grad_norm: .inf}", "qat.clip_grad_norm: expected a number > 0 or null, got .inf, which is not finite"),
    ("data: {augment: {horizontal_flip: 50}}", "data.augment.horizontal_flip: expected a number from 0 to 1, got 50"),
    ("quantization: {weight: {bits: 0}}", "quantization.weight.bits: expected a whole number from 1 to 16 or null, "
     "got 0"),
    ("quantization: {first_bits: 0}", "quantization.first_bits: expected a whole number from 1 to 16 or null, got 0"),
    ("quantization: {weight: {percentile: 50}}", "quantization.weight.percentile: expected a number > 50 and <= 100 "
     "or null, got 50"),
    ("seed: 9223372036854775808", "seed: expected a whole number >= 0 and < 9223372036854775808, "
     "got 9223372036854775808"),
    ("seed: " + "1" * 5000, f"seed: expected a whole number >= 0 and < 9223372036854775808, got '{'1' * 76}..."),
    ("qat: {ema_decay: 0}", "qat.ema_decay: expected a number > 0 and < 1 or null, got 0"),
    # far beyond what anybody means
    (f"qat: {{accumulate: {10**26}}}", "qat.accumulate: expected at most 1,000,000,000"),
    ("qat: {distillation: {temperature: 1.0e+200}}", "qat.distillation.temperature: expected at most 1,000,000,000"),
    ("qat: {distillation: {features: {fc: 1.0e+200}}}", "qat.distillation.features.fc: expected at most 1,000,000,000"),
    ("qat: {mixup_alpha: 1.0e-300}", "qat.mixup_alpha: expected 0 or at least 1e-30"),
    (f"data: {{resize_size: {2**63}}}", "data.resize_size: expected at most 1,000,000,000"),
    ("data: {workers: 1000000}", "data.workers: expected a whole number from 0 to 1024 or null, got 1000000"),
    # several keys together
    ("qat: {distillation: {weight: 0, temperature: 4, features: {fc: 1}}}",
     "qat.distillation.temperature: 4 has no effect with weight: 0; leave it out"),
    ("qat: {distillation: {features: {fc: 0}}}",
     "qat.distillation.features: fc: 0 has no effect; give it a weight, or leave it out"),
    ("qat: {progressive: [{}]}", "qat.progressive[0]: it trains as the last stage does; set bits, or raise qat.epochs"),
    (
        "qat: {quantizer_lr: 1e-5, quantizer_lr_factor: 0.1}",
        "qat.quantizer_lr: 1e-05 and quantizer_lr_factor: 0.1 are two rates for the same parameters; leave one out",
    ),
    ("qat: {gradual: {}}",
     "qat.gradual: it makes nothing gradual; set activations_from or weight_share, or leave it out"),
    (
        "qat: {gradual: {activations_from: 0.2, weights_from: 0.7}}",
        "qat.gradual.weights_from: 0.7 has no effect without a weight_share below 1",
    ),
    (
        "cuda_graphs: true\nqat: {gradual: {weight_share: 0.5}}",
        "qat.gradual: compiled code does not follow its switches; leave it out, or set compile: false",
    ),
    (
        "compile: true\nqat: {gradual: {weight_share: 0.5}}",
        "qat.gradual: compiled code does not follow its switches; leave it out, or set compile: false",
    ),
    (
        "qat: {quantizer_optimizer: adamw}",
        "qat.quantizer_optimizer: 'adamw' beside 'sgd' needs a rate of its own; set quantizer_lr, such as 1e-5",
    ),
    ("qat: {epochs: 2, warmup_epochs: 2.5}", "qat.warmup_epochs: 2.5 is longer than qat.epochs: 2"),
    (
        "compile: false\ncuda_graphs: true",
        "cuda_graphs: true is about compiled models; leave compile: false out, or cuda_graphs",
    ),
    (
        "device: cpu\ncompile: true\ncuda_graphs: true",
        "cuda_graphs: true needs a CUDA device; on device 'cpu' leave it out",
    ),
    ("amp: fp16\ndevice: cpu", "amp: 'fp16' needs a CUDA device; on device 'cpu' use 'bf16' or 'none'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), BAD_FILES)
def test_a_bad_file(text: str, sentence: str) -> None:
    assert problems(text) == [f"r18.yaml: {sentence}"]


# The whole line: it begins with the override as typed

BAD_OVERRIDES = [
    ("qat.lr", "qat.lr: expected key.path=value, such as qat.lr=0.01"),
    ("=3", "=3: the key '' is empty or has an empty part; expected key.path=value"),
    ("qat..lr=3", "qat..lr=3: the key 'qat..lr' is empty or has an empty part; expected key.path=value"),
    ("seed=[1", "seed=[1: line 1, column 3: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("qat={lr: 1, lr: 2}", "qat={lr: 1, lr: 2}: line 1: 'lr' is already set on line 1; keep one of them"),
    ("qat.lrr=0.1", "qat.lrr=0.1: unknown key; did you mean 'lr'?"),
    ("qat.lr=a\n", "'qat.lr=a\\n': expected a number > 0, got 'a'"),
    ("foo.a=1", f"foo.a=1: foo: unknown key; valid keys: {TOP_KEYS}"),
    ("qat.lr.x=1", "qat.lr.x=1: 'qat.lr' has no keys of its own; set it as qat.lr=..."),
    ("model.kwargs.a.b=1", "model.kwargs.a.b=1: 'model.kwargs.a' is 3, which has no keys of its own"),
    ("qat={epochs: ten}", "qat={epochs: ten}: qat.epochs: expected a whole number >= 0, got 'ten'"),
    ("data.mean=[1]", "data.mean=[1]: expected a list of 3 numbers or null, got [1]"),
    ("data.mean=[1, a, 1]", "data.mean=[1, a, 1]: data.mean[1]: expected a number, got 'a'"),
    ("amp=fp16", "amp=fp16: 'fp16' needs a CUDA device; on device 'cpu' use 'bf16' or 'none'"),
    (
        "quantization.overrides.layer1.0.conv1.weight.bits=40",
        "quantization.overrides.layer1.0.conv1.weight.bits=40: expected a whole number from 1 to 16 or null, got 40",
    ),
]


@pytest.mark.parametrize(("override", "line"), BAD_OVERRIDES)
def test_a_bad_override(override: str, line: str) -> None:
    assert problems("device: cpu\nmodel: {kwargs: {a: 3}}", override) == [line]


def test_the_file_is_blamed_for_its_own_values_only() -> None:
    text = "qat: {lr: 0, epochs: -1, betas: {a: 1}}"
    found = problems(text, "qat.lr=-1", "qat.lr=-2", "qat.betas.b=2", "foo.a=1", "foo.b=1")
    assert [line.split(": ")[:2] for line in found] == [
        ["r18.yaml", "qat.epochs"],
        ["qat.lr=-2", "expected a number > 0, got -2"],
        ["r18.yaml", "qat.betas"],
        ["foo.a=1", "foo"],
    ]


def test_an_override_fixes_an_error_of_the_file() -> None:
    assert load("qat: {lr: 0, schedule: cosin}", "qat.lr=1", "qat.schedule=cosine").qat.lr == 1


def test_all_problems_are_reported_at_once() -> None:
    text = "seed: a\nseed: b\nqat: {lrr: 1}\ndata: {batch_size: 0, download: no, mean: [1]}\nname: [a\n"
    assert len(problems(text)) == 1  # a syntax error hides what follows
    found = problems(text.replace("[a", "a"), "qat.lr", "amp=x", "seed={")
    assert found == [
        "r18.yaml: line 2: 'seed' is already set on line 1; keep one of them",
        "qat.lr: expected key.path=value, such as qat.lr=0.01",
        "seed={: line 1, column 2: not valid YAML: expected the node content, but found '<stream end>'",
        "r18.yaml: seed: expected a whole number >= 0 and < 9223372036854775808, got 'b'",
        "amp=x: expected 'none', 'bf16' or 'fp16', got 'x'",
        "r18.yaml: data.download: expected true or false, got 'no'",
        "r18.yaml: data.mean: expected a list of 3 numbers or null, got [1]",
        "r18.yaml: data.batch_size: expected a whole number >= 1, got 0",
        "r18.yaml: qat.lrr: unknown key; did you mean 'lr'?",
    ]


def test_an_unexpected_kind_of_error_still_reads_well() -> None:
    details = {"type": "string_pattern_mismatch", "loc": ("model", "name"), "input": "x", "ctx": {"pattern": "^a"}}
    error = ValidationError.from_exception_data("RunConfig", [details])
    assert sentences_of(error, dotted) == ["model.name: should match pattern '^a', got 'x'"]


def test_a_file_name_that_is_not_utf8_gives_a_run_name(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"b\xff.yaml")
    file.write_text("seed: 1")
    assert load_config(str(file)).name == "b\\udcff"


def test_what_qat_leaves_out_follows_the_bits(tmp_path: Path) -> None:
    def read(*overrides: str) -> RunConfig:
        (tmp_path / "run.yaml").write_text("quantization: {weight: {bits: 2}, activation: {bits: 4}}\n")
        return load_config(str(tmp_path / "run.yaml"), overrides)

    two = read("qat.progressive=[{bits: 8}, {weight: {bits: 3}, lr: 0.1}, {weight: {bits: 3}, activation: {bits: 8}}]")
    assert (two.qat.optimizer, two.qat.lr) == ("adamw", 0.002)
    assert [stage.lr for stage in two.qat.progressive] == [3.125e-05, 0.1, 0.001]
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
    with pytest.raises(UserError, match=r"qat=3: expected a section \(epochs,"):
        read("qat=3")
