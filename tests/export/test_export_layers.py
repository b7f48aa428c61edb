"""Export of every kind of layer, prepared or written by the user: integers in the file, equal answers."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

import qat
from qat.export import compare_layers, optimized_operators
from qat.export.onnx.graph import stored_arrays
from qat.layers import QuantFunction, QuantLayer
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from qat.quantizer import Quantizer
from tests.references.prepared_case import Plain, activation_quantizers, draw

Inputs = dict[str, Tensor]


def layer_class(form: str, name: str) -> Any:
    """torch's layer, which `prepare` will replace, or the quantized one that users write into their own model."""
    return getattr(nn, name) if form == "prepared" else getattr(qat.layers, f"Quant{name}")


def quantized(net: nn.Module, inputs: Inputs, recipe: qat.QuantRecipe | None = None) -> nn.Module:
    """The model in evaluation mode, calibrated, and prepared unless its layers are quantized already."""
    own = any(isinstance(module, Quantizer) for module in net.modules())
    model = net.eval() if own else qat.prepare(net.eval(), recipe, inputs)
    qat.calibrate(model, [inputs])
    return model.eval()


def exported(path: Path, net: nn.Module, inputs: Inputs, recipe: qat.QuantRecipe | None = None) -> nn.Module:
    model = quantized(net, inputs, recipe)
    qat.export_onnx(model, path, inputs)
    return model


def assert_same(path: Path, model: nn.Module, inputs: Any) -> None:
    """The file has the model's answers, and the integers of every quantizer."""
    assert qat.verify_onnx(path, model, [inputs]).max_difference < 2e-6
    assert [layer for layer in compare_layers(path, model, inputs) if layer.differing] == []


def part_of(inputs: Inputs, samples: int) -> Inputs:
    """A batch of another size, made of these samples."""
    return {name: x.repeat(3, *[1] * (x.dim() - 1))[:samples].contiguous() for name, x in inputs.items()}


def expected_codes(weight: Tensor, quantizer: Quantizer, layer: QuantLayer | None) -> np.ndarray[Any, Any]:
    """clip(round(weight / scale)) in float64, in torch's layout."""
    scale, zero_point = quantizer.grid()
    assert not zero_point.any()
    rows = weight.detach() if layer is None else layer.channels_first(weight.detach())
    codes = np.clip(np.rint(rows.double().numpy() / scale.detach().double().numpy()), *quantizer.bounds())
    return codes if layer is None else layer.torch_layout(torch.from_numpy(codes)).numpy()


def weights_of(model: nn.Module) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Every weight's own integers, by the name of its layer."""
    for name, module in model.named_modules():
        inner = module.inner_weights() if hasattr(module, "inner_weights") else {}
        for key, (weight, _) in inner.items():
            yield f"{name}.{key}", expected_codes(weight, getattr(module, key).weight_quantizer, None)
        if isinstance(module, QuantLayer) and not isinstance(module, QuantFunction):
            yield name, expected_codes(module.weight, module.weight_quantizer, module)


def assert_file_is_in_integers(path: Path, model: nn.Module, floats: frozenset[tuple[int, ...]] = frozenset()) -> None:
    """The file holds the weights' own integers, in torch's layout or with the channels first, and no float weight.

    `floats`: shapes of float parameters that the file may hold.
    """
    proto = onnx.load(path)
    onnx.checker.check_model(proto)
    arrays = list(stored_arrays(proto.graph).values())
    integers = [array for array in arrays if array.dtype in (np.int8, np.uint8)]
    for name, codes in weights_of(model):
        assert any(array.size == codes.size and same_integers(array, codes) for array in integers), name
    found = {array.shape for array in arrays if array.dtype.kind == "f" and sum(axis > 1 for axis in array.shape) > 1}
    assert found <= floats


def same_integers(array: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]) -> bool:
    """A transposed convolution with groups is stored with the channels first."""
    return np.array_equal(*(each if array.shape == codes.shape else np.sort(each, None) for each in (array, codes)))


def assert_exports(path, net, inputs, recipe=None, floats=frozenset()) -> nn.Module:
    """Export; the answers are equal for three batch sizes, and so are the integers of every quantizer."""
    model = exported(path, net, inputs, recipe)
    assert_file_is_in_integers(path, model, floats)
    content = path.read_bytes()
    assert str(Path(qat.__file__).parent).encode() not in content and b'File "' not in content, "it names this machine"
    sizes = (len(next(iter(inputs.values()))), 1, 7)
    found = qat.verify_onnx(path, model, [part_of(inputs, samples) for samples in sizes])
    assert found.samples == sum(sizes) and found.agreement == 1.0 and found.max_difference < 2e-6
    for optimize in (True, False):
        layers = compare_layers(path, model, inputs, optimize)
        assert {layer.name for layer in layers} >= own_names(model)
        assert [layer for layer in layers if layer.differing > layer.elements / 1000 or layer.largest > 1] == []
    return model


def own_names(model: nn.Module) -> set[str]:
    """The activation quantizers; of a graph those that it calls itself, without those of parameters."""
    if not isinstance(model, fx.GraphModule):
        return set(activation_quantizers(model))
    nodes = [node for node in model.graph.nodes if node.op == "call_module" and node.args]
    called = {str(node.target) for node in nodes if node.args[0].op != "get_attr"}
    return called & set(activation_quantizers(model))


def convolutions(form: str) -> nn.Module:
    """All six: without bias, with groups, dilation, padding modes, output_padding."""
    parts = {}
    for axes in (1, 2, 3):
        conv, transposed = layer_class(form, f"Conv{axes}d"), layer_class(form, f"ConvTranspose{axes}d")
        first = conv(3, 4, 3, padding=1, bias=False, padding_mode="replicate" if axes == 2 else "zeros")
        parts[f"axes{axes}"] = nn.Sequential(
            first, nn.ReLU(), conv(4, 4, 2, groups=2, dilation=2), nn.ReLU(),
            transposed(4, 3, 3, stride=2, output_padding=1), nn.ReLU(), transposed(3, 6, 2, groups=3, bias=False),
        )  # fmt: skip
    return Plain(
        lambda self, signal, image, volume: {"1": self.axes1(signal), "2": self.axes2(image), "3": self.axes3(volume)},
        **parts,
    )


def linear_and_lookups(form: str) -> nn.Module:
    linear, embed = layer_class(form, "Linear"), layer_class(form, "Embedding")(11, 6, padding_idx=0)
    return Plain(
        lambda self, words: self.down(torch.relu(self.up(self.embed(words)))).sum(1),
        embed=embed, up=linear(6, 8), down=linear(8, 4, bias=False),
    )  # fmt: skip


def recurrent(form: str, bidirectional: bool, batch_first: bool, layers: int) -> nn.Module:
    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        output, (h, c) = self.lstm(x)
        gru, last = self.gru(x)
        return {"lstm": output, "h": h[-1], "c": c[-1], "gru": gru, "last": last[-1]}

    options = {"num_layers": layers, "batch_first": batch_first, "bidirectional": bidirectional}
    return Plain(forward, **{name.lower(): layer_class(form, name)(5, 4, **options) for name in ("LSTM", "GRU")})


def attention(form: str) -> nn.Module:
    def forward(self: Any, x: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.inner(x, 2 * x, 3 * x, need_weights=False)[0]
        y, weights = self.outer(x, key, value, key_padding_mask=padding)
        return x + y, weights

    kind = layer_class(form, "MultiheadAttention")
    outer = kind(8, 2, batch_first=True, kdim=5, vdim=6, bias=False)
    return Plain(forward, inner=kind(8, 2, batch_first=True), outer=outer)


def self_attention(form: str) -> nn.Module:
    attend = layer_class(form, "MultiheadAttention")(8, 2, batch_first=True)
    return Plain(lambda self, x: self.attend(x, x, x, need_weights=False)[0], attend=attend)


LOOKUPS = {"words": torch.tensor([[3, 0, 7, 1, 10], [8, 2, 0, 2, 5], [5, 4, 4, 9, 0]])}
PADDING = torch.tensor([[False, False, True], [False, True, True], [False, False, False]])
LAYERS: dict[str, tuple[Callable[[str], nn.Module], Inputs]] = {
    "convolutions": (convolutions, {"signal": draw(3, 3, 7), "image": draw(3, 3, 5, 6), "volume": draw(3, 3, 4, 4, 4)}),
    "linear layers and look-ups": (linear_and_lookups, LOOKUPS),
    "recurrent": (lambda form: recurrent(form, False, True, 2), {"x": draw(3, 3, 5)}),
    # Both directions read one tensor through two quantizers, whose grids are equal after calibration.
    "bidirectional": (lambda form: recurrent(form, True, True, 1), {"x": draw(3, 2, 5)}),
    "attention with a mask": (
        attention, {"x": draw(3, 4, 8), "key": draw(3, 3, 5, seed=1), "value": draw(3, 3, 6), "padding": PADDING},
    ),
    # Query, key and value are one tensor; a layer of the user's own has three quantizers for it, with equal grids.
    "self-attention": (self_attention, {"x": draw(3, 4, 8)}),
}  # fmt: skip


@pytest.mark.parametrize(("case", "form"), [
    *(pytest.param(case, "own", marks=[pytest.mark.slow] * (case == "recurrent")) for case in LAYERS),
    *((case, "prepared") for case in list(LAYERS)[:2]),  # the others are the same modules once prepared
])  # fmt: skip
def test_layers(case: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, inputs = LAYERS[case]
    assert_exports(tmp_path / "model.onnx", make(form), inputs)


@pytest.mark.parametrize(("layer", "x"), [
    (nn.RNN(6, 8, 2, "relu", batch_first=True, bidirectional=True), draw(3, 4, 6)),
    (nn.Bilinear(6, 6, 16), draw(3, 6)),
    (nn.EmbeddingBag(11, 16, padding_idx=2), LOOKUPS["words"]),
], ids=lambda each: type(each).__name__)  # fmt: skip
def test_layers_without_a_twin_stay_in_float(layer: nn.Module, x: Tensor, tmp_path: Path) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.own(x, x) if isinstance(layer, nn.Bilinear) else self.own(x)
        return self.head(y[0] if isinstance(y, tuple) else y)

    for example in (None, x):
        model = qat.prepare(Plain(forward, own=layer, head=nn.Linear(16, 3)), example_inputs=example)
        assert notes_of(model, LEFT_IN_FLOAT)["own"] == f"{type(layer).__name__} has no quantized twin"
        qat.calibrate(model, [x])
        model.train()(x).sum().backward()
        assert all(parameter.grad is not None for parameter in model.get_submodule("own").parameters())
    qat.export_onnx(model.eval(), tmp_path / "model.onnx", x)
    assert qat.verify_onnx(tmp_path / "model.onnx", model, [torch.cat([x, x])]).max_difference < 2e-6


def test_the_exporter_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its packages log under their own names, and the terminal shows that to users who have not configured logging."""
    model = quantized(linear_and_lookups("own"), LOOKUPS)
    root = logging.getLogger()
    handlers = root.handlers[:]
    root.handlers.clear()  # pytest's own; without any, Python logs to the terminal
    try:
        qat.export_onnx(model, tmp_path / "model.onnx", LOOKUPS)
    finally:
        root.handlers[:] = handlers
    assert capfd.readouterr() == ("", "")


def test_a_file_does_not_claim_a_free_number_of_steps(tmp_path: Path) -> None:
    """The file repeats the cell for each step, so with time as the first axis that axis is fixed."""
    torch.manual_seed(0)
    x = draw(3, 4, 5)
    model = quantized(recurrent("own", False, False, 1), {"x": x})
    with pytest.warns(UserWarning, match=r"^export_onnx: the first axis of the input 'x' is fixed at 3,"):
        qat.export_onnx(model, tmp_path / "model.onnx", {"x": x})
    assert qat.verify_onnx(tmp_path / "model.onnx", model, [{"x": x}]).max_difference < 2e-6
    with pytest.raises(Exception, match=r"(?i)dimension|shape|input"):  # refused, instead of a wrong answer
        qat.verify_onnx(tmp_path / "model.onnx", model, [{"x": torch.cat([x, x])}])


def test_batch_norms_fold_into_grouped_transposed_convolutions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    up, grouped = nn.ConvTranspose2d(4, 4, 3, stride=2), nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False)
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(6)
    net = nn.Sequential(OrderedDict(up=up, norm1=norms[0], relu=nn.ReLU(), grouped=grouped, norm2=norms[1]))
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.linspace(-1.5, 1, norm.num_features))
            norm.weight[2] = 0
            norm.bias.normal_()
            norm.running_mean.normal_()
    x, path = draw(4, 4, 5, 5), tmp_path / "model.onnx"
    model = exported(path, net, {"input": x})
    signs = {name: torch.sign(model.get_submodule(name).weight.detach()) for name in ("norm1", "norm2")}
    arrays = [numpy_helper.to_array(initializer) for initializer in onnx.load(path).graph.initializer]
    for layer, norm in (("up", "norm1"), ("grouped", "norm2")):
        twin = model.get_submodule(layer)
        rows = twin.channels_first(torch.from_numpy(dict(weights_of(model))[layer]))
        rows = (rows * signs[norm].reshape(-1, 1, 1, 1)).numpy()
        stored = rows if layer == "grouped" else rows.swapaxes(0, 1)
        assert any(array.dtype == np.int8 and np.array_equal(array, stored) for array in arrays), layer
    assert_same(path, model, x)


def test_parametrised_layers(tmp_path: Path) -> None:
    """The file holds the integers of the computed weight, not of one of its factors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(),
                        nn.utils.parametrizations.spectral_norm(nn.Linear(36, 5)))  # fmt: skip
    with torch.no_grad():
        net[0].parametrizations.weight.original0.mul_(torch.tensor([1.0, 2.0, 3.0, 0.5]).reshape(4, 1, 1, 1))
    model = assert_exports(tmp_path / "model.onnx", net, {"input": draw(4, 3, 5, 5)})
    assert all(parametrize.is_parametrized(model.get_submodule(name)) for name in ("0", "3"))


def test_layers_are_compared_in_any_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(4, 6), tmp_path / "model.onnx"
    part = qat.prepare(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), example_inputs=x)
    parts = {"part": part, "head": nn.Sequential(qat.QuantLinear(4, 3))}
    net = Plain(lambda self, x: self.head(self.part(x)) - self.head(self.part(x.flip(-1))), **parts)
    model = exported(path, net, {"x": x})
    calls = ["part.input_quantizer", "part.0_quantizer", "head.0.input_quantizer"]
    found = compare_layers(path, model, x)
    assert {layer.name for layer in found} == {*calls, *(f"{name}.1" for name in calls)}
    assert not any(layer.differing for layer in found)
    with torch.no_grad():
        model.get_submodule("part.2").bias += 1
    assert {layer.name for layer in compare_layers(path, model, x) if layer.differing} == {calls[2], f"{calls[2]}.1"}
    exported(path, qat.QuantLinear(6, 2), {"x": x})
    with pytest.raises(ValueError, match=r"has no quantizer 'part.input_quantizer'; was it made from this model\?$"):
        compare_layers(path, model, x)


def test_a_text_encoder_with_a_padding_mask(tmp_path: Path) -> None:
    torch.manual_seed(0)
    words = torch.randint(1, 12, (4, 6))
    words[::2, -2:] = 0
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2, None, False)
    parts = {"embed": nn.Embedding(12, 16), "encoder": encoder, "head": nn.Linear(16, 3)}
    net = Plain(lambda self, words, padding: self.head(self.encoder(self.embed(words), None, padding).mean(1)), **parts)
    path = tmp_path / "model.onnx"
    model = assert_exports(path, net, {"words": words, "padding": words == 0})
    assert not {"Gemm", "MatMul", "FusedMatMul"} & set(optimized_operators(path))
    # The mask acts in the file too: other words under the mask change nothing.
    moved = words.clone()
    moved[::2, -2:] = 7
    changed = model(moved, torch.zeros_like(words, dtype=torch.bool)) - model(moved, words == 0)
    assert changed.abs().max() > 1e-3
    assert qat.verify_onnx(path, model, [{"words": moved, "padding": words == 0}]).max_difference < 2e-6
