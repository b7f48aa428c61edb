"""Float models by name, their pretrained weights, and weights from files."""

import logging
import math
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from qat.training.config.stages import ModelConfig
from qat.training.model import build_model
from tests.runs.tiny_training import Logged, Patch, user_error

OWN_NETS = """\
from torch import nn
def net(num_classes, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Linear(width, num_classes))
def fixed():
    return nn.Linear(2, 3)
def broken(**kwargs):
    raise RuntimeError("two\\nlines")
class Nets:
    linear = nn.Linear
def number():
    return 3
WIDTH = 8
"""
FILES = {"own_nets.py": OWN_NETS}
FORMATS = "it must be .safetensors, or a dict of tensors written by torch.save"

SMALL = "squeezenet1_1"  # 1.2 million parameters, and its classifier is a convolution


def build(classes: int = 10, /, **fields: Any) -> nn.Module:
    return build_model(ModelConfig(**fields), classes)


def refusal(classes: int = 10, /, **fields: Any) -> str:
    return user_error(build, classes, **fields)


def own(**fields: Any) -> nn.Module:
    """The model `net` of the user's module for 5 classes."""
    return build(5, name="own_nets:net", **fields)


def refused(checkpoint: str) -> str:
    return user_error(own, checkpoint=checkpoint)


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty folder of downloaded weights, and no network."""

    def offline(*args: object, **kwargs: object) -> None:
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", offline)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def module(folder: Path) -> Path:
    return folder / "own_nets.py"


def test_a_torchvision_builder_gets_classes_and_kwargs() -> None:
    model = build(7, name="resnet18", kwargs={"width_per_group": 64})
    assert model.fc.out_features == 7
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert build(7, name=SMALL, num_classes=12).classifier[1].out_channels == 12


@pytest.mark.parametrize(("fields", "facts"), [
    ({"name": "ResNet81"}, "model.name: 'ResNet81' | did you mean 'resnet18'?"),
    ({"name": "resnet18", "kwargs": {"depth": 3}}, "model.kwargs: {'depth': 3} do not fit resnet18 | 'depth'"),
    ({"num_classes": 9}, "model.num_classes: 9 is fewer than the data set's 10 classes"),
    ({"weights": "DEFAULT", "checkpoint": "x.pt"}, "model.weights: 'DEFAULT' | model.checkpoint: 'x.pt'"),
    ({"name": "vgg16", "weights": "IMAGENET1K_FEATURES"}, "it has DEFAULT, IMAGENET1K_V1"),
    # models of one's own
    ({"name": "own_net:net"},
     "no module 'own_net', neither in the current folder '{folder}' nor on PYTHONPATH nor installed"),
    ({"name": "own_nets:nett"}, "'own_nets' has no 'nett'; did you mean 'net'?"),
    ({"name": "own_nets:WIDTH"}, "is int; it must be callable"),
    ({"name": "own_nets:broken"}, "failed (RuntimeError: two lines, {folder}/own_nets.py:7)"),
    ({"name": "own_nets:net", "kwargs": {"depth": 1}},
     "failed (TypeError: net() got an unexpected keyword argument 'depth'"),
    ({"name": "own_nets:fixed", "num_classes": 10}, "model.num_classes: 10 has no effect"),
    ({"name": "own_nets:net", "weights": "DEFAULT"}, "model.weights: 'DEFAULT' has no effect with 'own_nets:net'"),
])  # fmt: skip
def test_names_and_arguments_that_do_not_fit(folder: Path, fields: dict[str, Any], facts: str) -> None:
    said = refusal(**fields)
    assert all(fact.replace("{folder}", str(folder)) in said for fact in facts.split(" | "))
    assert said.startswith("model.") and len(said.splitlines()) == 1


def test_pretrained_weights_keep_all_but_a_classifier_of_other_size(hub: Path, caplog: Logged) -> None:
    published = torchvision.models.get_model(SMALL, weights=None, num_classes=1000).state_dict()
    torch.save(published, hub / "squeezenet1_1-b8a52dc0.pth")
    same = build(10, name=SMALL, weights="DEFAULT", num_classes=1000)
    assert equal(same.state_dict(), published)
    with caplog.at_level(logging.INFO, logger="qat"):
        model = build(10, name=SMALL, weights="SqueezeNet1_1_Weights.IMAGENET1K_V1")
    assert caplog.messages == [
        "model.weights: SqueezeNet1_1_Weights.IMAGENET1K_V1 has 1000 classes; classifier.1 is new, with 10"
    ]
    state = model.state_dict()
    assert state["classifier.1.weight"].shape == (10, 512, 1, 1)
    assert all(torch.equal(value, published[key]) for key, value in state.items() if "classifier" not in key)
    assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


def described(model: nn.Module) -> list[tuple[str, str, dict[str, Any]]]:
    """All modules with their settings and the shapes of what they hold."""
    plain = (bool, int, float, str)
    return [
        (
            name,
            f"{type(module).__name__} {module.extra_repr()}",
            {key: value for key, value in vars(module).items() if isinstance(value, plain)},
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.filterwarnings("ignore:auxiliary heads in the pretrained googlenet model:UserWarning")
@pytest.mark.parametrize("name", [SMALL, "googlenet", "inception_v3", "vit_b_16"])
def test_without_weights_the_same_layers_are_built(hub: Path, monkeypatch: Patch, name: str) -> None:
    config = ModelConfig(name=name, weights="IMAGENET1K_SWAG_E2E_V1" if name == "vit_b_16" else "DEFAULT")
    with monkeypatch.context() as patch:
        patch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda *_, **__: {})
        patch.setattr(nn.Module, "load_state_dict", lambda *_, **__: None)
        expected = build_model(config, 10)
    found = build_model(config, 10, with_weights=False)
    assert described(found) == described(expected)
    assert [value.shape for value in found.state_dict().values()] == [
        value.shape for value in expected.state_dict().values()
    ]


def test_weights_that_cannot_be_downloaded_say_where_the_file_goes(hub: Path) -> None:
    advice = f"put a whole squeezenet1_1-b8a52dc0.pth into '{hub}', or use model.checkpoint"
    said = refusal(name=SMALL, weights="DEFAULT")
    assert "DEFAULT of squeezenet1_1" in said and "no network" in said and said.endswith(advice)

    (hub / "squeezenet1_1-b8a52dc0.pth").write_bytes(b"")
    assert refusal(name=SMALL, weights="DEFAULT").endswith(advice)


def test_own_models_come_from_the_current_folder(module: Path) -> None:
    before = list(sys.path)
    model = build(5, name="own_nets:net", kwargs={"width": 6})
    assert (model[0].out_channels, model[2].out_features) == (6, 5)
    assert build(5, name="own_nets:fixed").out_features == 3
    assert build(5, name="own_nets:Nets.linear", kwargs={"in_features": 2, "out_features": 4}).out_features == 4
    assert sys.path == before


@pytest.mark.parametrize("nest", ["state_dict", "model", None])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module.", "model.", "model._orig_mod."])  # point 62
def test_a_checkpoint_may_be_nested_and_prefixed(module: Path, nest: str | None, prefix: str) -> None:
    state = own().state_dict()
    named = OrderedDict((prefix + key, value) for key, value in state.items())
    beside = {"epoch": 3, "callbacks": {}, "hyper_parameters": {"lr": 0.1}}  # as Lightning's, where self.model has it
    torch.save({nest: named, **beside} if nest else named, "x.pt")
    assert equal(own(checkpoint="x.pt").state_dict(), state)


def test_a_safetensors_checkpoint_may_lack_the_step_counters(module: Path) -> None:
    state = own().state_dict()
    save_file({key: value + 1 for key, value in state.items() if value.dim()}, "x.safetensors")
    loaded = own(checkpoint="x.safetensors").state_dict()
    assert equal(loaded, {key: value + 1 if value.dim() else value for key, value in state.items()})


@pytest.mark.parametrize("lines", [
    "    model = nn.ModuleDict({'module': nn.Linear(2, 3)})  # DataParallel's prefix",
    "    model = nn.Linear(2, 3)\n    model.register_buffer('mask', torch.tensor([0.0, -float('inf')]))",
])  # fmt: skip
def test_a_prefix_and_infinite_values_of_the_models_own_are_kept(lines: str, module: Path) -> None:
    module.write_text(f"import torch\nfrom torch import nn\ndef net():\n{lines}\n    return model\n")
    state = own().state_dict()
    torch.save(state, "x.pt")
    assert equal(own(checkpoint="x.pt").state_dict(), state)


def test_weights_of_older_layer_versions_load(tmp_path: Path) -> None:
    """MNASNet refuses a state without its version, and a safetensors file has no versions."""
    state = torchvision.models.mnasnet0_5(num_classes=10).state_dict()
    save_file(state, tmp_path / "x.safetensors")
    model = build(10, name="mnasnet0_5", checkpoint=str(tmp_path / "x.safetensors"))
    assert equal(model.state_dict(), state)


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    """The weights of own_nets:net for 5 classes with some replaced, added or (None) removed."""
    state: dict[str, Tensor | None] = dict(own().state_dict())
    state |= {key.replace("_0", "0.").replace("_2", "2."): value for key, value in changes.items()}
    return {key: value for key, value in state.items() if value is not None}


def test_a_checkpoint_of_another_model_is_refused(module: Path) -> None:
    torch.save(changed(_0weight=torch.zeros(4, 3, 5, 5), _2bias=None, extra=torch.zeros(1)), "x.pt")
    said = refused("x.pt")
    assert said.startswith("model.checkpoint: 'x.pt' is not of own_nets:net: ") and len(said.splitlines()) == 1
    assert all(fact in said for fact in ('"2.bias"', '"extra"', "[4, 3, 5, 5]", "[4, 3, 3, 3]"))
    torch.save({f"net.{key}": value for key, value in own().state_dict().items()}, "x.pt")
    assert refused("x.pt").startswith("model.checkpoint: 'x.pt' is not of own_nets:net: ")


@pytest.mark.parametrize(("changes", "problem"), [
    *(
        ({"_2bias": torch.ones(5).to(dtype)}, f"2.bias is {dtype} in the file, torch.float32 in the model")
        for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
    ),
    ({"_2bias": torch.tensor([1.0, 2.0, math.nan, 0.0, 0.0])}, "2.bias has values that are not finite"),
    ({"_2bias": torch.full((5,), 1e300, dtype=torch.float64)}, "2.bias has values that are not finite"),
])  # fmt: skip
def test_weights_of_another_kind_are_refused(module: Path, changes: dict[str, Tensor | None], problem: str) -> None:
    torch.save(changed(**changes), "x.pt")
    assert refused("x.pt").startswith(f"model.checkpoint: 'x.pt': {problem}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_point_weights_of_another_width_load(module: Path, dtype: torch.dtype) -> None:
    state = {key: value.to(dtype) if value.is_floating_point() else value for key, value in changed().items()}
    torch.save(state, "x.pt")
    loaded = own(checkpoint="x.pt").state_dict()
    assert equal(loaded, {key: value.to(loaded[key].dtype) for key, value in state.items()})


@pytest.mark.parametrize(("content", "problem"), [
    (b"garbage", "cannot be read (torch.save did not write it)"),
    # Pickled: loading it would run code. Point 62: torch's page of advice, with colours, stood here.
    (nn.Linear(2, 2), "cannot be read (it holds a torch.nn.modules.linear.Linear, which only its code could read"),
    ({"epoch": 3}, f"holds something else than weights; {FORMATS}"),
    ({"2.bias": torch.ones(5, device="meta")}, f"holds something else than weights; {FORMATS}"),
    ({}, "holds no weights"),
])  # fmt: skip
def test_files_without_weights_are_refused(module: Path, content: Any, problem: str) -> None:
    if isinstance(content, bytes):
        Path("x.pt").write_bytes(content)
        Path("x.safetensors").write_bytes(content)
        assert refused("x.safetensors").startswith("model.checkpoint: 'x.safetensors' cannot be read (")
    else:
        torch.save(content, "x.pt")
    assert refused("y.pt") == f"model.checkpoint: 'y.pt' does not exist (looked in '{module.parent}')"
    assert refused(str(module.parent)) == f"model.checkpoint: '{module.parent}' is a folder"
    said = refused("x.pt")
    assert said.startswith(f"model.checkpoint: 'x.pt' {problem}") and len(said.splitlines()) == 1


def test_a_model_of_timm_by_name() -> None:
    pytest.importorskip("timm")
    model = build(5, name="timm/mobilenetv4_conv_small", kwargs={"drop_rate": 0.1})
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    for fields, fact in (
        ({"name": "timm/mobilenetv4_conv_smal"}, "Unknown model (mobilenetv4_conv_smal)"),
        ({"name": "timm/resnet18", "weights": "IMAGENET1K_V1"}, "Invalid pretrained tag (IMAGENET1K_V1)"),
        ({"name": "timm/resnet18", "kwargs": {"size": 3}}, "with {'size': 3} (TypeError: "),
    ):
        said = refusal(**fields)
        assert said.startswith("model: timm cannot build ") and fact in said


def test_without_timm_the_way_to_it_is_named(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert refusal(name="timm/resnet18") == (
        "model.name: 'timm/resnet18' needs timm, which is not installed; pip install timm"
    )
