"""Operators of .tflite files that are not torch's own: the integers, and what is said of those that there are none."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.export import compare_litert_layers
from qat.export.litert.exporter import UnwritableWarning
from qat.training.config.file import load_config
from qat.training.errors import UserError
from qat.training.loop.preparation import prepare_model

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tflite_micro")
from qat.export.litert.engines import ENGINES
from tests.export.litert.test_litert import FLOAT_ENDS, Lambda, operators, prepared

X, SEQUENCE = (4, 4, 9, 9), (4, 4, 20)
up = nn.ConvTranspose2d
NETS = {
    "transposed": (
        nn.Sequential(
            nn.Conv2d(4, 6, 3, 2), nn.ReLU(), up(6, 6, 4, 2, 1), nn.ReLU6(), up(6, 5, 3, 2, 1, 1),
            up(5, 5, (3, 4), (2, 3), (1, 0)), up(5, 4, 2, 3, 0, 1),
        ),
        X, {"CONV_2D": 1, "TRANSPOSE_CONV": 4, "STRIDED_SLICE": 2},
    ),
    "leaky": (
        nn.Sequential(
            nn.Conv2d(4, 6, 1), nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(6, 5, 1), nn.LeakyReLU(1.5), nn.Flatten(),
            nn.Linear(405, 6), nn.LeakyReLU(), nn.Linear(6, 2),
        ),
        X, {"CONV_2D": 2, "FULLY_CONNECTED": 2, "MUL": 6, "MAXIMUM": 2, "MINIMUM": 1, "RESHAPE": 1},
    ),
    "extremes": (
        Lambda(lambda a, b: F.relu(torch.minimum(a, b)) + torch.maximum(a, b.mean((2, 3), keepdim=True))),
        X, {"CONV_2D": 3, "MAXIMUM": 2, "MINIMUM": 1, "AVERAGE_POOL_2D": 1, "ADD": 1},
    ),
    "shuffles": (
        nn.Sequential(
            nn.PixelUnshuffle(3), nn.Conv2d(36, 12, 1), nn.ChannelShuffle(3), nn.Conv2d(12, 12, 1), nn.PixelShuffle(2),
        ),
        X, {"CONV_2D": 2, "TRANSPOSE": 3, "RESHAPE": 6},
    ),
    "nearest": (
        nn.Sequential(
            nn.Upsample((5, 16)), nn.Conv2d(4, 5, 1), nn.Upsample((20, 31), mode="nearest-exact"), nn.Conv2d(5, 2, 1)
        ),
        X, {"CONV_2D": 2, "RESIZE_NEAREST_NEIGHBOR": 2},
    ),
    "begins with margins": (nn.Sequential(nn.ZeroPad2d((1, 2, 0, 1)), nn.Conv2d(4, 6, 3)), X, {"PAD": 1, "CONV_2D": 1}),
    "rows": (
        nn.Sequential(
            nn.Conv1d(4, 6, 3, 2, 1), nn.BatchNorm1d(6), nn.ReLU(),
            nn.Conv1d(6, 6, 3, padding="same", dilation=2, groups=6), nn.ReLU6(), nn.MaxPool1d(2),
            nn.Upsample(scale_factor=2.0), nn.ConvTranspose1d(6, 4, 4, 2, 1),
            nn.AvgPool1d(3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2),
        ),
        SEQUENCE,
        {"PAD": 1, "CONV_2D": 1, "DEPTHWISE_CONV_2D": 1, "MAX_POOL_2D": 1, "RESIZE_NEAREST_NEIGHBOR": 1,
         "TRANSPOSE_CONV": 1, "AVERAGE_POOL_2D": 2, "TRANSPOSE": 1, "RESHAPE": 3, "FULLY_CONNECTED": 1},
    ),
    "rows that stay rows": (
        nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv1d(4, 3, 4)),
        SEQUENCE, {"CONV_2D": 2, "TRANSPOSE": 2, "RESHAPE": 2, "MUL": 2, "MAXIMUM": 1},
    ),
}  # fmt: skip


def trained(net: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(shape)
    return prepared(net, x), x


@pytest.mark.parametrize("name", NETS)
def test_operators_and_integers(name: str, tmp_path: Path) -> None:
    """Points 32 and 46."""
    net, shape, expected = NETS[name]
    (model, x), path = trained(net, shape), tmp_path / "model.tflite"
    qat.export_litert(model, path, x, batch=2)
    assert Counter(operators(path.read_bytes())) == {**FLOAT_ENDS, **expected}
    for engine in ENGINES:
        layers = compare_litert_layers(path, model, x, engine=engine)
        elements, differing = (sum(getattr(layer, key) for layer in layers) for key in ("elements", "differing"))
        assert max(layer.largest for layer in layers) <= 1 and differing <= 0.01 * elements, (engine, layers)
        assert engine != "xnnpack" or not sum(layer.beyond_ties for layer in layers), layers


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({"scale_factor": 2.0}, ENGINES),
        ({"size": (17, 13), "align_corners": True}, ENGINES[:1]),
        ({"size": (5, 7)}, ()),
    ],
)
def test_bilinear_images_differ_at_ties_and_by_the_bits_of_their_positions(options, exact, tmp_path) -> None:
    """Point 32. The kernels in fixed point keep 10 bits of the ratio of the sizes, XNNPACK 11 of a position."""
    net = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Upsample(mode="bilinear", **options), nn.Conv2d(6, 5, 1))
    (model, x), path = trained(net, X), tmp_path / "model.tflite"
    qat.export_litert(model, path, x)
    assert "RESIZE_BILINEAR" in operators(path.read_bytes())
    for engine in ENGINES:
        resized = compare_litert_layers(path, model, x, engine=engine)[2]
        assert resized.name == "0_quantizer.1" and resized.largest <= 1 and resized.differing < 0.1 * resized.elements
        assert engine not in exact or not resized.beyond_ties, resized


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.fc = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.cells(x)[0][:, -1])


UNWRITABLE = {
    "recurrent": (Recurrent(), (2, 5, 4), ["'cells' (", "LiteRT has no integer operator"]),
    "norms": (
        nn.Sequential(
            nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(2), nn.Linear(81, 6), nn.LayerNorm(6)
        ),
        X, ["'1' (group_norm): LiteRT has no integer operator", "'5' (layer_norm): LiteRT has no integer operator"],
    ),
    "groups": (
        nn.Sequential(nn.Conv2d(4, 8, 1), nn.ConvTranspose2d(8, 8, 2, groups=2)),
        X, ["'1' (conv_transpose2d): LiteRT's TRANSPOSE_CONV has neither groups nor dilation"],
    ),
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
