"""Operators, blocks and few bits in every engine that runs .tflite files, and what is said where there are none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock

import qat
from qat.export import compare_litert_layers
from qat.export.litert.engines import ENGINES
from qat.export.litert.exporter import UnwritableWarning
from qat.export.litert.firmware import quantized_multiplier
from qat.export.litert.products import headroom
from qat.training.config.file import load_config
from qat.training.errors import UserError
from qat.training.model import prepare_model
from tests.export.litert.test_litert import EXACT, NETS, Lambda, check_operators, operators, prepared, trained
from tests.references.prepared_case import Plain, draw

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tflite_micro")

X, SEQUENCE = (4, 4, 9, 9), (4, 4, 20)
up = nn.ConvTranspose2d
OPERATORS = {
    "transposed": (nn.Sequential(nn.Conv2d(4, 6, 3, 2), nn.ReLU(), up(6, 6, 4, 2, 1), nn.ReLU6(), up(6, 5, 3, 2, 1, 1),
                                 up(5, 5, (3, 4), (2, 3), (1, 0)), up(5, 4, 2, 3, 0, 1)), X,
                   {"CONV_2D": 1, "TRANSPOSE_CONV": 4, "STRIDED_SLICE": 2}),
    "leaky": (nn.Sequential(nn.Conv2d(4, 6, 1), nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(6, 5, 1), nn.LeakyReLU(1.5),
                            nn.Flatten(), nn.Linear(405, 6), nn.LeakyReLU(), nn.Linear(6, 2)), X,
              {"CONV_2D": 2, "FULLY_CONNECTED": 2, "MUL": 6, "MAXIMUM": 2, "MINIMUM": 1, "RESHAPE": 1}),
    "extremes": (Lambda(lambda a, b: F.relu(torch.minimum(a, b)) + torch.maximum(a, b.mean((2, 3), keepdim=True))), X,
                 {"CONV_2D": 3, "MAXIMUM": 2, "MINIMUM": 1, "AVERAGE_POOL_2D": 1, "ADD": 1}),
    "shuffles": (nn.Sequential(nn.PixelUnshuffle(3), nn.Conv2d(36, 12, 1), nn.ChannelShuffle(3), nn.Conv2d(12, 12, 1),
                               nn.PixelShuffle(2)), X, {"CONV_2D": 2, "TRANSPOSE": 3, "RESHAPE": 6}),
    "nearest": (nn.Sequential(nn.Upsample((5, 16)), nn.Conv2d(4, 5, 1), nn.Upsample((20, 31), mode="nearest-exact"),
                              nn.Conv2d(5, 2, 1)), X, {"CONV_2D": 2, "RESIZE_NEAREST_NEIGHBOR": 2}),
    "begins with margins": (nn.Sequential(nn.ZeroPad2d((1, 2, 0, 1)), nn.Conv2d(4, 6, 3)), X, {"PAD": 1, "CONV_2D": 1}),
    "rows": (nn.Sequential(nn.Conv1d(4, 6, 3, 2, 1), nn.BatchNorm1d(6), nn.ReLU(),
                           nn.Conv1d(6, 6, 3, padding="same", dilation=2, groups=6), nn.ReLU6(), nn.MaxPool1d(2),
                           nn.Upsample(scale_factor=2.0), nn.ConvTranspose1d(6, 4, 4, 2, 1), nn.AvgPool1d(3),
                           nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2)), SEQUENCE,
             {"PAD": 1, "CONV_2D": 1, "DEPTHWISE_CONV_2D": 1, "MAX_POOL_2D": 1, "RESIZE_NEAREST_NEIGHBOR": 1,
              "TRANSPOSE_CONV": 1, "AVERAGE_POOL_2D": 2, "TRANSPOSE": 1, "RESHAPE": 3, "FULLY_CONNECTED": 1}),
    "rows that stay rows": (nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv1d(4, 3, 4)),
                            SEQUENCE, {"CONV_2D": 2, "TRANSPOSE": 2, "RESHAPE": 2, "MUL": 2, "MAXIMUM": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_integers(name: str, tmp_path: Path) -> None:
    """Points 32 and 46."""
    net, shape, expected = OPERATORS[name]
    check_operators(net, shape, expected, tmp_path / "model.tflite", batch=2)


@pytest.mark.parametrize(("options", "exact"), [
    ({"scale_factor": 2.0}, ENGINES),
    ({"size": (17, 13), "align_corners": True}, ENGINES[:1]),
    ({"size": (5, 7)}, ()),
])  # fmt: skip
def test_bilinear_images_differ_at_ties_alone(options, exact, tmp_path) -> None:
    """Point 32. The kernels in fixed point keep 10 bits of the ratio of the sizes, XNNPACK 11 of a position."""
    net = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Upsample(mode="bilinear", **options), nn.Conv2d(6, 5, 1))
    (model, x), path = trained(net, X), tmp_path / "model.tflite"
    qat.export_litert(model, path, x)
    assert "RESIZE_BILINEAR" in operators(path.read_bytes())
    for engine in ENGINES:
        resized = compare_litert_layers(path, model, x, engine=engine)[2]
        others = resized.differing / 0.03 if engine in EXACT else resized.beyond_ties / 0.1  # whose ties are not ours
        assert resized.name == "0_quantizer.1" and resized.largest <= 1 and others < resized.elements
        assert engine not in exact or not resized.beyond_ties, resized


@pytest.mark.parametrize(("between", "rule"), [
    (nn.Upsample(scale_factor=2.0, mode="bilinear"), "up"),
    *[(each, "away") for each in (nn.AvgPool2d(2), nn.AvgPool2d(3, 2), nn.AvgPool2d(4), nn.AdaptiveAvgPool2d(2))],
    (Plain(lambda self, x: F.relu(x.mean((2, 3), keepdim=True))), "away"),
    (Plain(lambda self, x: F.relu(x - self.e(x)), e=nn.Conv2d(6, 6, 1)), "up"),
])  # fmt: skip
def test_ties_are_xnnpacks(between: nn.Module, rule: str, tmp_path: Path) -> None:
    """Point 75: signed integers of even counts, and sums on grids of powers of two."""
    x, path = draw(6, 4, 16, 16), tmp_path / "model.tflite"
    layers = nn.Conv2d(4, 6, 3, padding=1), between, nn.Conv2d(6, 5, 1)
    model = prepared(nn.Sequential(*layers), x, activation={"rule": "power_of_two"})
    qat.export_litert(model, path, x)
    layers = compare_litert_layers(path, model, x, engine="xnnpack")
    assert not any(each.differing for each in layers), layers
    assert torch.equal(model(x), qat.convert(model)(x))
    assert [step.ties for step in qat.integer_program(model).values() if step.ties] == [rule]


CELLS = {"cells": nn.GRU(4, 8, batch_first=True), "fc": nn.Linear(8, 3)}
RECURRENT = Plain(lambda self, x: self.fc(self.cells(x)[0][:, -1]), **CELLS)
UNWRITABLE = {
    "recurrent": (RECURRENT, (2, 5, 4), ["'cells' (", "LiteRT has no integer operator"]),
    "norms": (nn.Sequential(nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(2), nn.Linear(81, 6),
                            nn.LayerNorm(6)), X,
              ["'1' (group_norm): LiteRT has no integer operator", "'5' (layer_norm): LiteRT has no integer operator"]),
    "groups": (nn.Sequential(nn.Conv2d(4, 8, 1), nn.ConvTranspose2d(8, 8, 2, groups=2)), X,
               ["'1' (conv_transpose2d): LiteRT's TRANSPOSE_CONV has neither groups nor dilation"]),
    "a factor that is no ratio": (
        nn.Sequential(nn.Conv2d(4, 8, 1), nn.Upsample(scale_factor=1.5)),
        X, ["'1' (upsample_nearest2d): torch resizes 9 pixels to 13 by 1.5 and LiteRT by the ratio of the sizes"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNWRITABLE)
def test_prepare_says_by_layer_what_the_file_will_refuse(name: str, tmp_path: Path) -> None:
    """Points 32, 35 and 46: before the training, all of it, with a way out that was not taken yet."""
    net, shape, sentences = UNWRITABLE[name]
    x = torch.randn(shape)
    with pytest.warns(UnwritableWarning) as warned:
        model = qat.prepare(net, qat.QuantRecipe(target="litert"), x)
    (said,) = (str(each.message) for each in warned)
    assert all(each in said for each in sentences) and "target whose file is ONNX" in said
    qat.calibrate(model, [x])
    with pytest.raises(ValueError, match=r"^export_litert: ") as raised:
        qat.export_litert(model.eval(), tmp_path / "model.tflite", x)
    assert said == f"prepare: {raised.value}"
    other = qat.prepare(net, qat.QuantRecipe(target="integer_only"), x)  # silently, since no .tflite is asked for
    qat.calibrate(other, [x])
    with pytest.raises(ValueError, match=r"prepare the model with QuantRecipe\(target='litert'\)"):
        qat.export_litert(other.eval(), tmp_path / "model.tflite", x)


def test_a_run_is_refused_before_its_training(tmp_path: Path) -> None:
    """Point 32: the trainer does not train for hours what cannot be written."""
    text = "data: {name: digits}\nmodel: {name: resnet18}\nquantization: {target: TARGET}\n"
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    for target in ("litert", "integer_only"):
        (tmp_path / f"{target}.yaml").write_text(text.replace("TARGET", target))
    with pytest.raises(UserError, match=r"export_litert: '1' \(elu\): LiteRT has no integer operator"):
        prepare_model(net, load_config(str(tmp_path / "litert.yaml")), (3, 8, 8))
    prepare_model(net, load_config(str(tmp_path / "integer_only.yaml")), (3, 8, 8))


def test_a_relu_behind_a_float_concatenation_is_not_lost(tmp_path: Path) -> None:
    """Point 32's class: no quantizer follows, and CONCATENATION fuses no activation."""
    net = Lambda(lambda a, b: F.relu(torch.cat([a, b], 1)), 16)
    net.last = nn.Identity()  # type: ignore[assignment]
    x = torch.randn(X)
    model = prepared(net, x, target="onnxruntime")
    with pytest.raises(ValueError, match="CONCATENATION"):
        qat.export_litert(model, tmp_path / "model.tflite", x)


def test_a_file_that_does_not_fit_is_said_in_a_sentence(tmp_path: Path) -> None:
    """Point 22: no raw message of an engine."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, path = torch.randn(4, 4), tmp_path / "model.tflite"
    model = prepared(net, x, weight={"bits": 4})
    qat.export_litert(model, path, x, four_bits=True)
    with pytest.raises(ValueError, match="TensorFlow Lite Micro lacks what it printed"):
        qat.verify_litert(path, model, [x], engine="micro")
    other, images = trained(nn.Sequential(nn.Conv2d(4, 2, 1)), X)
    with pytest.raises(ValueError, match=r"the .tflite file stores inputs of the shapes \[\(1, 4\)\], got tensors of"):
        qat.verify_litert(path, other, [images])
    path.write_bytes(b"\x08\x0aonnx" * 20)
    with pytest.raises(ValueError, match=r"it is no \.tflite file"):
        qat.verify_litert(path, model, [x])


pytest.importorskip("ai_edge_litert")
pytest.importorskip("tflite_micro")


def with_a_mask(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    y = F.relu(F.conv2d(x, self.weight, padding="same"))
    return self.last(y if mask is None else y * mask)


OTHERS = {
    "a padding word and an optional argument (point 22)": Plain(
        with_a_mask, weight=nn.Parameter(torch.randn(6, 4, 3, 5)), last=nn.Conv2d(6, 2, 1)
    ),
    "begins with margins (point 22)": nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 6, 3)),
    "basic blocks": nn.Sequential(BasicBlock(4, 4),
                                  BasicBlock(4, 8, 2, nn.Sequential(nn.Conv2d(4, 8, 1, 2), nn.BatchNorm2d(8))),
                                  *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]),
    "inverted residuals": nn.Sequential(InvertedResidual(4, 4, 1, 6), InvertedResidual(4, 6, 2, 6), nn.Conv2d(6, 8, 1),
                                        nn.ReLU6()),
    "an even average": nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1)),
    "one output": nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Flatten(), nn.Linear(100, 1)),
    "joined on other grids": nn.Sequential(Lambda(lambda a, b: F.relu(torch.cat([a + b, a - b], 1)), 16),
                                           nn.AvgPool2d(3), nn.Flatten(), nn.Linear(54, 5)),
    "a bound leaves out the 0 of a margin": nn.Sequential(nn.Conv2d(4, 4, 1), nn.ZeroPad2d(1), nn.Hardtanh(0.5, 2.0),
                                                          nn.Conv2d(4, 4, 1)),
    "margins below 0": nn.Sequential(nn.Conv2d(4, 4, 1), nn.ZeroPad2d((-1, 2, 1, -2)), nn.Conv2d(4, 4, 3)),
    "a pool before its activation": nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 4, 1)),
    "margins that no maximum chooses (point 91)": Lambda(
        lambda a, _: F.max_pool2d(F.pad(a, (0, 1, 0, 1), value=-torch.inf), 3, 2)
    ),
    "one operand twice": Lambda(lambda a, b: F.relu(a + a) + b * b),
    "a clip of codes": Lambda(lambda a, b: F.relu6(b) + a * b),
    "a bound between two levels": Lambda(lambda a, b: F.hardtanh(b) + a * b),
}  # fmt: skip


def check(model: nn.Module, x: Tensor, path: Path) -> None:
    """Every integer in every engine, near-ties aside: within a level where sums are rounded twice, in fixed point."""
    qat.export_litert(model, path, x)
    for engine in ENGINES:
        layers = compare_litert_layers(path, model, x, engine=engine)
        assert layers and max(each.largest for each in layers) <= 1, (engine, layers)
        assert engine not in EXACT or not any(each.beyond_ties for each in layers), (engine, layers)


@pytest.mark.parametrize("name", OTHERS)
def test_every_integer_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = OTHERS[name]
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    model = prepared(net, torch.randn(4, 4, 9, 9))
    check(model, 1.5 * torch.randn(6, 4, 9, 9), tmp_path / "model.tflite")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bound_between_two_levels_is_one_of_the_next_grid(engine: str, tmp_path: Path) -> None:
    """A clip in place is no part of the layer before it: both have a grid."""
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(4, 8, 3), "norm": nn.BatchNorm2d(8)}
    net = Plain(lambda self, x: F.hardtanh_(self.norm(self.conv(x))), **parts).eval()
    for size in (10, 20, 40, 80):  # on some of these grids the bound would be rounded down, and show
        x = size * torch.randn(4, 4, 9, 9)
        model = prepared(net, x)
        qat.export_litert(model, tmp_path / "model.tflite", x)
        layers = compare_litert_layers(tmp_path / "model.tflite", model, x, engine=engine)
        assert max(each.largest for each in layers) <= 1, layers


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("weight", "activation"), [(8, 6), (4, 4), (2, 3)])
def test_few_bits(weight: int, activation: int, signed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(BasicBlock(4, 4), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8),
                        nn.Conv2d(8, 6, 1), nn.ReLU6(), nn.Flatten(), nn.Linear(294, 5))  # fmt: skip
    recipe = {"weight": {"bits": weight}, "activation": {"bits": activation, "signed": signed}}
    images, path = torch.randn(4, 4, 9, 9), tmp_path / "model.tflite"
    check(prepared(net, images, **recipe), torch.randn(4, 4, 9, 9), path)
    model = prepared(net[1:], images, **recipe)
    qat.export_litert(model, path, images)
    for engine in ENGINES:
        found = compare_litert_layers(path, model, images, engine=engine)
        differing = sum(each.differing for each in found)
        assert max(each.largest for each in found) <= 1
        assert differing <= (0 if engine in EXACT else 0.01) * sum(each.elements for each in found)


@pytest.mark.parametrize("name", ["joined on other grids", "flatten of an image", "basic blocks"])
def test_grids_of_another_target(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = OTHERS[name] if name in OTHERS else NETS[name][0]
    model = prepared(net, torch.randn(4, 4, 9, 9), target="onnxruntime")
    check(model, torch.randn(4, 4, 9, 9), tmp_path / "model.tflite")


def test_multipliers_are_close_and_normal() -> None:
    for real in [*np.exp(np.random.default_rng(0).uniform(-20, 5, 1000)), 1.0, 0.5, 1 - 2**-40]:
        multiplier, shift = quantized_multiplier(float(real))
        assert 2**30 <= multiplier < 2**31
        assert multiplier * 2.0 ** (shift - 31) == pytest.approx(real, rel=2**-31)
    assert quantized_multiplier(2.0**-40) == (0, 0)


def test_headroom_fills_int8_and_keeps_the_bias() -> None:
    bias = torch.tensor([2**28 - 1, -3])
    assert headroom(torch.tensor([[1, -1]]), torch.tensor([5])) == 64
    assert headroom(torch.tensor([[7, -8]]), torch.tensor([5])) == 8
    assert headroom(torch.tensor([[1, -1]]), bias) == 4
    assert headroom(torch.tensor([[0]]), torch.tensor([0])) == 64


def test_a_quantizer_behind_a_shuffle_keeps_its_name(tmp_path: Path) -> None:
    """A clip is computed before the shuffle in front of it, while another reader wants the shuffled tensor."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.view(-1, 2, 2, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
        return self.conv(x.relu()) + x  # type: ignore[no-any-return]

    x = torch.randn(2, 4, 3, 6)
    model = qat.prepare(Plain(forward, conv=nn.Conv2d(4, 4, 1)), qat.QuantRecipe(target="litert"), x)
    qat.calibrate(model, [x])
    qat.export_litert(model.eval(), tmp_path / "model.tflite", x, batch=2)
    layers = compare_litert_layers(tmp_path / "model.tflite", model, x)
    assert [layer.beyond_ties for layer in layers] == [0] * 4
