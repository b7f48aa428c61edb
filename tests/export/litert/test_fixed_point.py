"""`convert(requantize="fixed_point")` computes every integer of TensorFlow Lite Micro, to the bit."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock

import qat
from qat.fused.evaluating import Recorder
from qat.integers.evaluation import call_names, evaluation_copy
from qat.integers.grids import numbers_of
from qat.kernels import plain_formulas

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tflite_micro")
from qat.export import compare_litert_layers
from qat.export.litert.engines import ENGINES, TorchFile
from qat.export.litert.file import HIGHEST
from qat.export.litert.reading import ReadFile
from tests.export.litert.test_litert import NETS, Lambda, prepared

REFUSED = {"hard ones", "linear and hardswish", "softmax", "nearest"}


class Functional(nn.Module):
    """A padding word of a function, and an argument that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 4, 3, 5)), nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = F.relu(F.conv2d(x, self.weight, padding="same"))
        return self.last(y if mask is None else y * mask)


OTHERS = {
    "a padding word and an optional argument (point 22)": Functional(),
    "begins with margins (point 22)": nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 6, 3)),
    "basic blocks": nn.Sequential(
        BasicBlock(4, 4),
        BasicBlock(4, 8, 2, nn.Sequential(nn.Conv2d(4, 8, 1, 2), nn.BatchNorm2d(8))),
        *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)],
    ),
    "inverted residuals": nn.Sequential(
        InvertedResidual(4, 4, 1, 6), InvertedResidual(4, 6, 2, 6), nn.Conv2d(6, 8, 1), nn.ReLU6()
    ),
    "an even average": nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1)),
    "one output": nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Flatten(), nn.Linear(100, 1)),
    "joined on other grids": nn.Sequential(
        Lambda(lambda a, b: F.relu(torch.cat([a + b, a - b], 1)), 16), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(54, 5)
    ),
    "one operand twice": Lambda(lambda a, b: F.relu(a + a) + b * b),
    "a clip of codes": Lambda(lambda a, b: F.relu6(b) + a * b),
    "a bound between two levels": Lambda(lambda a, b: F.hardtanh(b) + a * b),
}


def highest_codes(model: nn.Module) -> dict[str, int]:
    """The highest code of every quantizer; in a file it is 127."""
    evaluated = evaluation_copy(model)
    assert isinstance(evaluated, fx.GraphModule)
    quantizers = {name: evaluated.get_submodule(str(node.target)) for node, name in call_names(evaluated).items()}
    return {name: int(numbers_of(each).grid.high) for name, each in quantizers.items()}  # type: ignore[arg-type]


def check(model: nn.Module, x: Tensor, path: Path, engine: str = "micro") -> None:
    """Every integer and the outputs, in both."""
    qat.export_litert(model, path, x)
    data, highest = path.read_bytes(), highest_codes(model)
    converted = qat.convert(model, "reference", requantize="fixed_point")
    assert isinstance(converted.graph_module, fx.GraphModule)
    recorder = Recorder(converted.graph_module)
    with torch.no_grad(), plain_formulas():
        recorder.run(x)
    file = ReadFile(data)
    names = [name for name in file.names if name in highest]
    assert set(names) == set(recorder.codes) == set(highest)
    for name, theirs in zip(names, TorchFile(ReadFile(data).with_outputs(names), engine, codes=True)(x), strict=True):
        assert torch.equal(recorder.codes[name].int() + HIGHEST - highest[name], theirs.int()), name
    if [name for name, _ in file.operators()][-1] == "DEQUANTIZE":  # else the last layer has no grid, and ends in float
        assert torch.equal(converted(x), TorchFile(data, engine)(x)[0])


@pytest.mark.parametrize("name", [*sorted(NETS.keys() - REFUSED), *OTHERS])
def test_every_integer_is_that_of_the_micro_kernels(name: str, tmp_path: Path) -> None:
    net = OTHERS[name] if name in OTHERS else NETS[name][0]
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    model = prepared(net, torch.randn(4, 4, 9, 9))
    check(model, 1.5 * torch.randn(6, 4, 9, 9), tmp_path / "model.tflite")


class Clipped(nn.Module):
    """A clip in place, which is no part of the layer before it: both have a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.hardtanh_(self.norm(self.conv(x)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bound_between_two_levels_is_one_of_the_next_grid(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for size in (10, 20, 40, 80):  # on some of these grids the bound would be rounded down, and show
        x = size * torch.randn(4, 4, 9, 9)
        model = prepared(Clipped().eval(), x)
        qat.export_litert(model, tmp_path / "model.tflite", x)
        layers = compare_litert_layers(tmp_path / "model.tflite", model, x, engine=engine)
        assert max(each.largest for each in layers) <= 1, layers


@pytest.mark.parametrize(("weight", "activation"), [(8, 6), (4, 4), (2, 3)])
def test_few_bits(weight: int, activation: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = {"weight": qat.QuantSpec(bits=weight), "activation": qat.QuantSpec(bits=activation)}
    x = torch.randn(4, 4, 9, 9)
    check(prepared(OTHERS["basic blocks"], x, **recipe), torch.randn(4, 4, 9, 9), tmp_path / "model.tflite")


def test_ties_of_inputs_are_rounded_away_from_zero(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = prepared(nn.Conv2d(1, 2, 1), torch.tensor([-128.0, 127.0]).view(2, 1, 1, 1) / 64)
    ties = (torch.arange(-64, 64) + 0.5) / 64
    check(model, ties.view(-1, 1, 1, 1), tmp_path / "model.tflite")


@pytest.mark.parametrize("name", ["joined on other grids", "flatten of an image", "basic blocks"])
def test_grids_of_another_target(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = OTHERS[name] if name in OTHERS else NETS[name][0]
    model = prepared(net, torch.randn(4, 4, 9, 9), target="onnxruntime")
    check(model, torch.randn(4, 4, 9, 9), tmp_path / "model.tflite")
