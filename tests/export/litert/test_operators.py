"""Operators, blocks and few bits in every engine that runs .tflite files, and what is said where there are none."""

from collections import Counter
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
from qat.training.loop.preparation import prepare_model
from tests.export.litert.test_litert import check, joined, operators, prepared, trained
from tests.references.prepared_case import Plain

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tflite_micro")

X, SEQUENCE = (4, 4, 9, 9), (4, 4, 20)


def shuffled(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


conv, linear, up, seq = nn.Conv2d, nn.Linear, nn.ConvTranspose2d, nn.Sequential
THREE = "CONV_2D CONV_2D CONV_2D"
IMAGES: dict[str, tuple[nn.Module, str]] = {
    "stride 2, margins of torch": (seq(conv(4, 6, 4, 2, 1), nn.ReLU()), "PAD CONV_2D"),
    "same margins": (seq(conv(4, 6, 3, padding=1), nn.ReLU6()), "CONV_2D"),
    "dilation": (conv(4, 6, 3, padding=2, dilation=2), "CONV_2D"),
    "depthwise": (conv(4, 8, 3, padding=1, groups=4), "DEPTHWISE_CONV_2D"),
    "groups": (conv(4, 8, 3, padding=1, groups=2), "CONV_2D"),
    "flatten of an image": (seq(conv(4, 6, 3, 2), nn.MaxPool2d(2, 1), nn.AvgPool2d(1), nn.Flatten(), linear(54, 5)),
                            "CONV_2D MAX_POOL_2D AVERAGE_POOL_2D RESHAPE FULLY_CONNECTED"),
    "max pooling with margins": (seq(conv(4, 6, 1), nn.MaxPool2d(4, 2, 1)), "CONV_2D PADV2 MAX_POOL_2D"),
    "max pooling, ceiling": (seq(conv(4, 6, 1), nn.MaxPool2d(2, 2, ceil_mode=True)), "CONV_2D MAX_POOL_2D"),
    "average of everything": (seq(conv(4, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(6, 5)),
                              "CONV_2D AVERAGE_POOL_2D RESHAPE FULLY_CONNECTED"),
    "three axes": (seq(conv(4, 6, 1), nn.Flatten(2), linear(81, 5)),
                   "CONV_2D TRANSPOSE RESHAPE RESHAPE FULLY_CONNECTED"),
    "add": (joined(lambda a, b: a + b), f"{THREE} ADD"),
    "sub": (joined(lambda a, b: a - b), f"{THREE} SUB"),
    "mul": (joined(lambda a, b: a * b), f"{THREE} MUL"),
    "cat": (joined(lambda a, b: torch.cat([a, b], 1), 16), f"{THREE} CONCATENATION"),
    "chunk and shuffle": (joined(lambda a, b: shuffled(a).chunk(2, 1)[0] + b[:, :4], 4),
                          f"{THREE} ADD TRANSPOSE RESHAPE RESHAPE SPLIT STRIDED_SLICE"),
    "squeeze and excitation": (joined(lambda a, b: a * torch.sigmoid(b.mean((2, 3), keepdim=True))),
                               f"{THREE} AVERAGE_POOL_2D LOGISTIC MUL"),
    "hard ones": (joined(lambda a, b: F.hardswish(a) * F.hardsigmoid(b)), f"{THREE} HARD_SWISH DEPTHWISE_CONV_2D MUL"),
    "silu, written over its operand": (seq(conv(4, 6, 3, padding=1), nn.SiLU(inplace=True)), "CONV_2D LOGISTIC MUL"),
    "tanh": (seq(conv(4, 6, 1), nn.Tanh(), conv(6, 6, 1)), "CONV_2D CONV_2D TANH"),
    "softmax": (seq(conv(4, 6, 3, 2), nn.Flatten(), linear(96, 5), nn.Softmax(1)),
                "CONV_2D RESHAPE FULLY_CONNECTED SOFTMAX"),
    "nearest": (seq(conv(4, 6, 1), nn.Upsample(scale_factor=2.0), conv(6, 6, 1)),
                "CONV_2D CONV_2D RESIZE_NEAREST_NEIGHBOR"),
    "linear and hardswish": (seq(conv(4, 6, 3, 2), nn.Flatten(), linear(96, 5), nn.Hardswish(True), linear(5, 3)),
                             "CONV_2D RESHAPE FULLY_CONNECTED FULLY_CONNECTED HARD_SWISH"),
}  # fmt: skip
OPERATORS: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "transposed": (seq(conv(4, 6, 3, 2), nn.ReLU(), up(6, 6, 4, 2, 1), nn.ReLU6(), up(6, 5, 3, 2, 1, 1),
                       up(5, 5, (3, 4), (2, 3), (1, 0)), up(5, 4, 2, 3, 0, 1)), X,
                   "CONV_2D" + 4 * " TRANSPOSE_CONV" + 2 * " STRIDED_SLICE"),
    "leaky": (seq(conv(4, 6, 1), nn.LeakyReLU(0.1, inplace=True), conv(6, 5, 1), nn.LeakyReLU(1.5), nn.Flatten(),
                  linear(405, 6), nn.LeakyReLU(), linear(6, 2)), X,
              2 * "CONV_2D FULLY_CONNECTED MAXIMUM " + "MINIMUM RESHAPE" + 6 * " MUL"),
    "extremes": (joined(lambda a, b: F.relu(torch.minimum(a, b)) + torch.maximum(a, b.mean((2, 3), keepdim=True))), X,
                 f"{THREE} MAXIMUM MAXIMUM MINIMUM AVERAGE_POOL_2D ADD"),
    "shuffles": (seq(nn.PixelUnshuffle(3), conv(36, 12, 1), nn.ChannelShuffle(3), conv(12, 12, 1), nn.PixelShuffle(2)),
                 X, "CONV_2D CONV_2D" + 3 * " TRANSPOSE RESHAPE RESHAPE"),
    "nearest, of a size": (seq(nn.Upsample((5, 16)), conv(4, 5, 1), nn.Upsample((20, 31), mode="nearest-exact"),
                               conv(5, 2, 1)), X, 2 * "CONV_2D RESIZE_NEAREST_NEIGHBOR "),
    "begins with margins": (seq(nn.ZeroPad2d((1, 2, 0, 1)), conv(4, 6, 3)), X, "PAD CONV_2D"),
    "rows": (seq(nn.Conv1d(4, 6, 3, 2, 1), nn.BatchNorm1d(6), nn.ReLU(),
                 nn.Conv1d(6, 6, 3, padding="same", dilation=2, groups=6), nn.ReLU6(), nn.MaxPool1d(2),
                 nn.Upsample(scale_factor=2.0), nn.ConvTranspose1d(6, 4, 4, 2, 1), nn.AvgPool1d(3),
                 nn.AdaptiveAvgPool1d(1), nn.Flatten(), linear(4, 2)), SEQUENCE,
             "PAD CONV_2D DEPTHWISE_CONV_2D MAX_POOL_2D RESIZE_NEAREST_NEIGHBOR TRANSPOSE_CONV AVERAGE_POOL_2D"
             " AVERAGE_POOL_2D TRANSPOSE RESHAPE RESHAPE RESHAPE FULLY_CONNECTED"),
    "rows that stay rows": (seq(nn.Conv1d(4, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv1d(4, 3, 4)), SEQUENCE,
                            2 * "CONV_2D TRANSPOSE RESHAPE MUL " + "MAXIMUM"),
}  # fmt: skip
"""Small models, the shape of their input, and the operators besides the two ends that they must consist of."""


@pytest.mark.parametrize("name", [*IMAGES, *OPERATORS])
def test_operators_and_integers(name: str, tmp_path: Path) -> None:
    """Points 32 and 46. HARD_SWISH, and ties of averages, differ in every engine."""
    net, shape, expected = OPERATORS[name] if name in OPERATORS else (IMAGES[name][0], X, IMAGES[name][1])
    model, x = trained(net, shape)
    check(model, x, tmp_path / "model.tflite", batch=2 if name in OPERATORS else 1, share=0.01)
    found = Counter(operators((tmp_path / "model.tflite").read_bytes()))
    assert found == Counter(f"QUANTIZE {expected} DEQUANTIZE".split())


@pytest.mark.parametrize(("options", "exact"), [
    ({"scale_factor": 2.0}, ENGINES),
    ({"size": (17, 13), "align_corners": True}, ENGINES[:1]),
    ({"size": (5, 7)}, ()),
])  # fmt: skip
def test_bilinear_images_differ_at_ties_alone(options, exact, tmp_path) -> None:
    """Point 32. The kernels in fixed point keep 10 bits of the ratio of the sizes, XNNPACK 11 of a position."""
    net = seq(conv(4, 6, 1), nn.ReLU(), nn.Upsample(mode="bilinear", **options), conv(6, 5, 1))
    (model, x), path = trained(net, X), tmp_path / "model.tflite"
    qat.export_litert(model, path, x)
    assert "RESIZE_BILINEAR" in operators(path.read_bytes())
    for engine in ENGINES:
        resized = compare_litert_layers(path, model, x, engine=engine)[2]
        assert resized.name == "0_quantizer.1" and resized.largest <= 1 and resized.differing < 0.1 * resized.elements
        assert engine not in exact or not resized.beyond_ties, resized


CELLS = {"cells": nn.GRU(4, 8, batch_first=True), "fc": linear(8, 3)}
RECURRENT = Plain(lambda self, x: self.fc(self.cells(x)[0][:, -1]), **CELLS)
UNWRITABLE = {
    "recurrent": (RECURRENT, (2, 5, 4), ["'cells' (", "LiteRT has no integer operator"]),
    "norms": (seq(conv(4, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(2), linear(81, 6), nn.LayerNorm(6)), X,
              ["'1' (group_norm): LiteRT has no integer operator", "'5' (layer_norm): LiteRT has no integer operator"]),
    "groups": (seq(conv(4, 8, 1), up(8, 8, 2, groups=2)), X,
               ["'1' (conv_transpose2d): LiteRT's TRANSPOSE_CONV has neither groups nor dilation"]),
    "a factor that is no ratio": (
        seq(conv(4, 8, 1), nn.Upsample(scale_factor=1.5)), X,
        ["'1' (upsample_nearest2d): torch resizes 9 pixels to 13 by 1.5 and LiteRT by the ratio of the sizes"],
    ),
    "curves": (seq(conv(4, 6, 1), nn.ELU(), conv(6, 6, 1)), X, ["'1' (elu): LiteRT has no"]),
    "margins": (seq(conv(4, 6, 1), nn.ReflectionPad2d(1)), X, ["'1' (pad): padding with reflect is"]),
    "averages": (seq(conv(4, 6, 1), nn.AvgPool2d(2, ceil_mode=True)), X, ["'1' (avg_pool2d): average"]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNWRITABLE)
def test_prepare_says_by_layer_what_the_file_will_refuse(name: str, tmp_path: Path) -> None:
    """Points 32, 35 and 46: before the training, all of it, with a way out that was not taken yet."""
    net, shape, sentences = UNWRITABLE[name]
    x = torch.randn(shape)
    with pytest.warns(UnwritableWarning) as warned:
        model = qat.prepare(net, qat.QuantRecipe(target="litert"), x)
    (said,) = (str(each.message) for each in warned)
    assert all(each in said for each in [*sentences, "target whose file is ONNX"]) and "\n" not in said
    qat.calibrate(model, [x])
    with pytest.raises(ValueError, match=r"^export_litert: ") as raised:
        qat.export_litert(model.eval(), tmp_path / "model.tflite", x)
    assert said == f"prepare: {raised.value}"
    other = qat.prepare(net, qat.QuantRecipe(target="integer_only"), x)  # silently, since no .tflite is asked for
    qat.calibrate(other, [x])
    with pytest.raises(ValueError, match=r"prepare the model with QuantRecipe\(target='litert'\)"):
        qat.export_litert(other.eval(), tmp_path / "model.tflite", x)
    assert not list(tmp_path.iterdir())


def test_a_curve_on_a_grid_that_its_operator_lacks_is_refused(tmp_path: Path) -> None:
    model, x = trained(seq(conv(4, 6, 1), nn.Sigmoid()), X, target="integer_only")
    with pytest.raises(ValueError, match=r"^export_litert: .*LOGISTIC has the scale 1/256 and the"):
        qat.export_litert(model, tmp_path / "model.tflite", x)


def test_a_run_is_refused_before_its_training(tmp_path: Path) -> None:
    """Point 32: the trainer does not train for hours what cannot be written."""
    text = "data: {name: digits}\nmodel: {name: resnet18}\nquantization: {target: TARGET}\n"
    net = seq(conv(3, 4, 1), nn.ELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(4, 10))
    for target in ("litert", "integer_only"):
        (tmp_path / f"{target}.yaml").write_text(text.replace("TARGET", target))
    with pytest.raises(UserError, match=r"export_litert: '1' \(elu\): LiteRT has no integer operator"):
        prepare_model(net, load_config(str(tmp_path / "litert.yaml")), (3, 8, 8))
    prepare_model(net, load_config(str(tmp_path / "integer_only.yaml")), (3, 8, 8))


def test_a_relu_behind_a_float_concatenation_is_not_lost(tmp_path: Path) -> None:
    """Point 32's class: no quantizer follows, and CONCATENATION fuses no activation."""
    net = joined(lambda a, b: F.relu(torch.cat([a, b], 1)), 16)
    net.last = nn.Identity()  # type: ignore[assignment]
    model, x = trained(net, X, target="onnxruntime")
    with pytest.raises(ValueError, match="CONCATENATION"):
        qat.export_litert(model, tmp_path / "model.tflite", x)


def test_a_file_that_does_not_fit_is_said_in_a_sentence(tmp_path: Path) -> None:
    """Point 22: no raw message of an engine."""
    net = seq(linear(4, 8), nn.ReLU(), linear(8, 3))
    x, path = torch.randn(4, 4), tmp_path / "model.tflite"
    model = prepared(net, x, weight={"bits": 4})
    qat.export_litert(model, path, x, four_bits=True)
    with pytest.raises(ValueError, match="TensorFlow Lite Micro lacks what it printed"):
        qat.verify_litert(path, model, [x], engine="micro")
    other, images = trained(seq(conv(4, 2, 1)), X)
    with pytest.raises(ValueError, match=r"the .tflite file stores inputs of the shapes \[\(1, 4\)\], got tensors of"):
        qat.verify_litert(path, other, [images])
    path.write_bytes(b"\x08\x0aonnx" * 20)
    with pytest.raises(ValueError, match=r"it is no \.tflite file"):
        qat.verify_litert(path, model, [x])


def with_a_mask(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    y = F.relu(F.conv2d(x, self.weight, padding="same"))
    return self.last(y if mask is None else y * mask)


OTHERS = {
    "a padding word and an optional argument (point 22)":
        Plain(with_a_mask, weight=nn.Parameter(torch.randn(6, 4, 3, 5)), last=conv(6, 2, 1)),
    "begins with margins (point 22)": seq(nn.ZeroPad2d(1), conv(4, 6, 3)),
    "basic blocks": seq(BasicBlock(4, 4), BasicBlock(4, 8, 2, seq(conv(4, 8, 1, 2), nn.BatchNorm2d(8))),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear(8, 5)),
    "inverted residuals": seq(InvertedResidual(4, 4, 1, 6), InvertedResidual(4, 6, 2, 6), conv(6, 8, 1), nn.ReLU6()),
    "an even average": seq(conv(4, 4, 1), nn.AvgPool2d(2), conv(4, 4, 1)),
    "one output": seq(nn.AvgPool2d(3, 2, 1), nn.Flatten(), linear(100, 1)),
    "joined on other grids": seq(joined(lambda a, b: F.relu(torch.cat([a + b, a - b], 1)), 16), nn.AvgPool2d(3),
                                 nn.Flatten(), linear(54, 5)),
    "one operand twice": joined(lambda a, b: F.relu(a + a) + b * b),
    "a clip of codes": joined(lambda a, b: F.relu6(b) + a * b),
    "a bound between two levels": joined(lambda a, b: F.hardtanh(b) + a * b),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_every_integer_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = OTHERS[name]
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    model = prepared(net, torch.randn(4, 4, 9, 9))
    check(model, 1.5 * torch.randn(6, 4, 9, 9), tmp_path / "model.tflite")


def test_a_bound_between_two_levels_is_one_of_the_next_grid(tmp_path: Path) -> None:
    """A clip in place is no part of the layer before it: both have a grid."""
    torch.manual_seed(0)
    net = Plain(lambda self, x: F.hardtanh_(self.norm(self.conv(x))), conv=conv(4, 8, 3), norm=nn.BatchNorm2d(8))
    for size in (10, 20, 40, 80):  # on some of these grids the bound would be rounded down, and show
        x = size * torch.randn(4, 4, 9, 9)
        check(prepared(net.eval(), x), x, tmp_path / "model.tflite")


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("weight", "activation"), [(8, 6), (4, 4), (2, 3)])
def test_few_bits(weight: int, activation: int, signed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = conv(4, 8, 3, padding=1), nn.ReLU(), conv(8, 8, 3, groups=8), conv(8, 6, 1), nn.ReLU6()
    net = seq(BasicBlock(4, 4), *layers, nn.Flatten(), linear(294, 5))
    recipe = {"weight": {"bits": weight}, "activation": {"bits": activation, "signed": signed}}
    model = prepared(net, torch.randn(4, 4, 9, 9), **recipe)
    check(model, torch.randn(4, 4, 9, 9), tmp_path / "model.tflite", share=0.02)


@pytest.mark.parametrize("name", ["joined on other grids", "flatten of an image", "basic blocks"])
def test_grids_of_another_target(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = OTHERS[name] if name in OTHERS else IMAGES[name][0]
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

    x, path = torch.randn(2, 4, 3, 6), tmp_path / "model.tflite"
    model = prepared(Plain(forward, conv=conv(4, 4, 1)), x)
    qat.export_litert(model, path, x, batch=2)
    layers = compare_litert_layers(path, model, x)
    assert [layer.beyond_ties for layer in layers] == [0] * 4
