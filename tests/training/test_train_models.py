"""train.py with models that depend on the input size (transformers), and models prepared in parts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import qat
from tests.runs.small_run import start, summary

MODELS = """
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer
from qat import QuantConv2d, QuantLinear, QuantSpec

def vit(num_classes):
    return VisionTransformer(16, 4, 1, 2, 16, 32, num_classes=num_classes)

class Padded(nn.Module):
    '''Pads the image to a multiple of its patches, and reads its weights in functions.'''

    def __init__(self, num_classes):
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 5, 5), nn.BatchNorm2d(8)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, num_classes)

    def forward(self, x):
        right, below = -x.shape[-1] % 5, -x.shape[-2] % 5
        if right or below:
            x = F.pad(x, (0, right, 0, below))
        x = torch.relu(self.norm(self.patches(x))).flatten(2).mT
        x = torch.relu(F.linear(x, self.mix.weight, self.mix.bias) + x)
        return self.head(x.mean(1))

class Parts(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU())
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        y = self.body(x).mean((2, 3))
        if y.sum() > 1e9:
            y = y / y.sum()
        return self.head(y)

class Own(nn.Module):
    '''Quantized layers written by hand.'''

    def __init__(self, num_classes):
        super().__init__()
        self.conv1, self.bn1 = QuantConv2d(3, 8, 3, 2, weight_spec=QuantSpec(bits=4)), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = QuantConv2d(8, 8, 3, 2, activation_spec=QuantSpec(bits=6)), nn.BatchNorm2d(8)
        self.head = QuantLinear(8, num_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.head(F.relu(self.bn2(self.conv2(x))).mean((2, 3)))
"""
CONFIG = """
data: {name: digits, image_size: 16, batch_size: 32, limit_train: 96, limit_val: 64}
float: {epochs: 1, lr: 0.01, optimizer: adamw}
qat: {epochs: 1, lr: 0.001, optimizer: adamw}
quantization: {calibration_batches: 2}
log_every: 2
watch: "off"
"""
FILES = {"manymodels.py": MODELS, "tiny.yaml": CONFIG}
FLOAT_PRODUCTS = {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "MatMulNBits", "Einsum"}


def run(model: str, *arguments: str) -> int:
    return start("run_dir=run", f"model.name=manymodels:{model}", *arguments)


SIZED = [("Padded", ["data.image_size=18", "quantization.first_bits=6", "quantization.last_bits=6"]), ("vit", [])]


@pytest.mark.parametrize(("model", "arguments"), SIZED)
def test_models_that_depend_on_the_image_size(folder: Path, model: str, arguments: list[str]) -> None:
    assert run(model, *arguments) == 0
    found = summary(folder / "run")
    onnx = found["onnx"]
    assert onnx["agreement"] >= 0.995
    assert abs(onnx["top1"] - found["qat"]["top1"]) <= 100 / 64
    layers = onnx["layers"]
    assert layers["largest_difference"] <= 1 and layers["differing"] <= layers["elements"] / 1000
    assert not FLOAT_PRODUCTS & set(onnx["operators"])
    table = (folder / "run" / "layers.txt").read_text()
    assert "not calibrated" not in table and "prepared in parts" not in table
    if model == "Padded":
        line = next(line for line in table.splitlines() if line.startswith("patches "))
        assert "int6" in line and "folds norm" in line
        assert next(line for line in table.splitlines() if line.startswith("mix ")).count("int8") == 1
    checkpoint = torch.load(folder / "run" / "last.pt", weights_only=True)
    assert any(key.endswith("quantizer.scale") for key in checkpoint["model"])


def test_quantized_layers_of_ones_own_are_float_before_they_are_quantized(folder: Path) -> None:
    assert run("Own") == 0
    found = summary(folder / "run")
    operators = found["onnx"]["operators"]
    assert (operators["QLinearConv"], operators["QGemm"]) == (2, 1) and not FLOAT_PRODUCTS & set(operators)
    table = (folder / "run" / "layers.txt").read_text().splitlines()
    assert "int4" in next(line for line in table if line.startswith("conv1 "))
    assert "uint6" in next(line for line in table if line.startswith("conv2.input_quantizer "))
    weights = load_file(folder / "run" / "float.safetensors")
    assert not weights["conv2.input_quantizer.calibrated"] and weights["conv2.input_quantizer.disabled"]
    trained = torch.load(folder / "run" / "last.pt", weights_only=True)["model"]
    assert trained["conv2.input_quantizer.calibrated"] and "conv2.input_quantizer.disabled" not in trained

    from manymodels import Own  # type: ignore[import-not-found]

    model = qat.load(folder / "run", float_model=Own(10))
    assert torch.equal(model.conv2.input_quantizer.scale, trained["conv2.input_quantizer.scale"])


def test_a_model_prepared_in_parts_trains_without_an_export(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("Parts") == 2
    said = capsys.readouterr().err
    assert "Parts was prepared in parts, since Parts cannot be captured" in said and "export.onnx=false" in said
    assert not (folder / "run").exists()
    assert run("Parts", "export.onnx=false") == 0
    found = summary(folder / "run")
    assert "onnx" not in found and found["qat"]["top1"] >= 0
    table = (folder / "run" / "layers.txt").read_text()
    assert "prepared in parts" in table and "body.2 " in table and "not calibrated" not in table
