"""`convert`: modules of integers that compute what evaluation does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qat
from tests.codes.test_evaluating import CASES, plainly, prepared, program_of
from tests.export.test_export_layers import quantized
from tests.fuzz.own import OwnConv2d

MODES = ("reflect", "circular", "replicate")


@pytest.mark.parametrize("case", CASES)
def test_the_integers_are_those_of_evaluation(case: str) -> None:
    model, x = prepared(case)
    converted = qat.convert(model)
    assert torch.equal(converted(x), plainly(model, x))
    assert not any(isinstance(module, qat.Quantizer) for module in converted.modules())
    assert "Quant" in repr(converted)
    large = [name for name, held in converted.state_dict().items() if held.is_floating_point() and held.dim() > 1]
    assert not large


@pytest.mark.parametrize("processor", [None, "no-vnni"])
@pytest.mark.parametrize("layers", [
    lambda: [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 80, 3)],
    lambda: [nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 1)],
    lambda: [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(17, 1, 8), nn.Conv2d(16, 4, 1)],
    lambda: [nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)],
], ids=["images", "series", "large windows", "rows"])  # fmt: skip
@pytest.mark.parametrize("axes", ["batch", "one"])
def test_one_sample_without_a_batch(layers, axes, processor, monkeypatch):
    if processor:
        monkeypatch.setenv("QAT_PROCESSOR", processor)
    torch.manual_seed(0)
    net = nn.Sequential(*layers())
    x = torch.randn({nn.Linear: (2, 16), nn.Conv1d: (2, 3, 16)}.get(type(net[0]), (2, 3, 16, 16)))
    x = x[0] if axes == "one" else x
    model: Any = quantized(net, x)
    expected = plainly(model, x)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        assert torch.allclose(qat.convert(model, "export")(x), expected, atol=1e-5)
    assert program_of(model) is not None
    assert torch.equal(qat.convert(model)(x), expected)


@pytest.mark.parametrize("layer", [
    *(lambda mode=mode: nn.Conv2d(16, 16, 3, padding=1, padding_mode=mode) for mode in MODES),
    lambda: nn.Conv2d(16, 16, 4, padding="same"),
    lambda: nn.ConvTranspose2d(16, 16, 2, 2),
    lambda: OwnConv2d(16, 16, 3),  # a twin of one's own computes as it says
], ids=[*MODES, "even", "transposed", "own"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_a_layer_that_is_not_on_codes_sums_integers(layer: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 24, 24)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), layer(), nn.ReLU(), layer(), nn.ReLU(), nn.Conv2d(16, 8, 1))
    model = quantized(net, x)
    assert torch.equal(qat.convert(model)(x), plainly(model, x))


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_nan_is_refused_by_the_name_of_its_quantizer(mode: Any) -> None:
    x = torch.randn(4, 3, 8, 8)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, padding_mode=mode), nn.ReLU(), nn.Conv2d(16, 8, 3))
    model = quantized(net, x)
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^the input of 'input_quantizer' contains NaN, which has no integer code$"):
        qat.convert(model)(x)


def test_hooks_that_are_left_out_are_named() -> None:
    model, _ = prepared()
    model[0].register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.warns(UserWarning, match="^convert: hooks and patched methods of 0 are left out"):
        qat.convert(model)


LOADED = """
import sys, torch
from safetensors.torch import load_file, save_file
file, *programs = sys.argv[1:]
x, found = load_file(file)["x"], {}
for number, program in enumerate(programs):
    if number == 1:
        import torch.ao.quantization.fx._decomposed  # the operators of "export"
    found[str(number)] = torch.export.load(program).module()(x)
assert "qat" not in sys.modules
save_file(found, file)
"""


def test_integers_are_saved_and_loaded_by_torch_alone(tmp_path: Path) -> None:
    model, x = prepared("pools")
    executions: list[Any] = ["reference", "export"]
    made = [qat.convert(model, each) for each in executions]
    files = [str(tmp_path / f"{number}.pt2") for number in range(len(made))]
    for converted, file in zip(made, files, strict=True):
        torch.export.save(torch.export.export(converted, (x,)), file)
    save_file({"x": x}, ends := str(tmp_path / "ends.safetensors"))
    subprocess.run([sys.executable, "-c", LOADED, ends, *files], check=True)
    found = load_file(ends)
    assert all(torch.equal(found[str(number)], converted(x)) for number, converted in enumerate(made))
    assert torch.equal(found["0"], plainly(model, x))
    assert (found["1"] - plainly(model, x)).abs().max() < 0.05


def test_what_cannot_be_converted_is_refused_in_a_sentence() -> None:
    model, _ = prepared()
    with pytest.raises(ValueError, match=r"execution must be one of reference, export, got 'fbgemm'$"):
        qat.convert(model, "fbgemm")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^convert: expected a model from qat.prepare, got Linear without quantizers$"):
        qat.convert(nn.Linear(2, 2))
