"""Sentences of docs/ that promise something, tried: each test has the sentence as its docstring."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.ssd import SSD

import qat
from qat.functional import ewgs_gradient
from qat.preparation.parts import prepared_parts
from qat.quantizer import create_quantizer, registered_quantizers
from qat.spec import default_spec

SIGNED, AFFINE = {"signed": True, "symmetric": True}, {"signed": False, "symmetric": False}
FOLLOWING = {"dorefa": {}, "binary": {"bits": 1}, "ternary": {"bits": 2}}


def images() -> Tensor:
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def calibrated(layers: list[nn.Module], recipe: qat.QuantRecipe | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*layers).eval()
    model(images())
    prepared = qat.prepare(model, recipe, example_inputs=images())
    qat.calibrate(prepared, [images()])
    return prepared.eval()


def two_convolutions(between: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
    return [first, between(), second, between(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]


def test_what_learns_nothing() -> None:
    """rules.md: nothing is learned by `minmax`, `ema`, `dorefa`, `ternary` and the MX formats; `binary` learns the
    scale of activations only."""
    learns: dict[str, set[str]] = {}
    for rule in ("minmax", "ema", "dorefa", "ternary", "binary", "mxfp4", "mxfp6", "mxfp8", "mxint8"):
        bits = {"ternary": 2, "binary": 1, "mxfp4": 4, "mxfp6": 6}.get(rule, 8)
        for role in ("weight", "activation") if rule != "ternary" else ("weight",):
            grid = {} if rule in ("dorefa", "minmax", "ema") else SIGNED
            quantizer = create_quantizer(default_spec(role).changed({"rule": rule, "bits": bits, **grid}), role)
            learns.setdefault(rule, set()).update(f"{role} {name}" for name, _ in quantizer.named_parameters())
    assert learns.keys() < set(registered_quantizers())
    assert {rule: names for rule, names in learns.items() if names} == {"binary": {"activation scale"}}


@pytest.mark.parametrize("rule", ["lsq", "dsq", "power_of_two", "minmax", "ema", *FOLLOWING])
def test_frozen_ranges(rule: str) -> None:
    """rules.md: `qat.freeze_scales` holds learned ranges, `minmax` and `ema`; what `dorefa`, `binary`, `ternary` take
    from the tensor itself goes on following it."""
    layer = qat.QuantConv2d(3, 4, 3, weight_spec=qat.QuantSpec(rule=rule, **FOLLOWING.get(rule, {})))
    qat.calibrate(layer, [images()])
    qat.freeze_scales(layer)
    before = layer.weight_quantizer.grid(layer.weight)[0].clone()
    with torch.no_grad():
        layer.weight *= 1.5
    layer.train()(images())
    assert torch.equal(before, layer.weight_quantizer.grid(layer.weight)[0]) is (rule not in FOLLOWING)


@pytest.mark.parametrize(("place", "called"), [("weight", "prepare: 0"), ("input", "calibrate")])
def test_scales_beyond_reach(place: str, called: str) -> None:
    """rules.md: a learned scale acts as at most 1e18, beyond which `prepare` and `calibrate` refuse."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), images()
    if place == "weight":
        model[0].weight.data[0] *= 1e22
    with pytest.raises(ValueError, match="1e18") as raised:
        qat.calibrate(qat.prepare(model.eval(), example_inputs=x), [x * (1e22 if place == "input" else 1)])
    assert str(raised.value).startswith(called)


@pytest.mark.parametrize(
    ("layers", "activation", "count"),
    [
        (two_convolutions(), AFFINE, 0),
        (two_convolutions(), SIGNED, 2),
        (two_convolutions(nn.Identity), SIGNED, 0),
        ([nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)], AFFINE, 1),
        ([nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)], AFFINE, 1),
        ([nn.ConvTranspose2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)], AFFINE, 1),
    ],
    ids=["plain", "a ReLU on signed grids", "signed grids", "the answer", "padding", "transposed"],
)
def test_convolutions_in_float(layers: list[nn.Module], activation: Any, count: int, tmp_path: Path) -> None:
    """training_loop.md: `float_convolutions` counts a convolution whose result is the model's answer, a transposed one,
    one with another `padding_mode` than zeros, one whose ReLU has a result on a signed symmetric grid."""
    model = calibrated(layers, qat.QuantRecipe(activation=activation))
    qat.export_onnx(model, tmp_path / "model.onnx", images()[:2])
    found = qat.verify_onnx(tmp_path / "model.onnx", model, [images()])
    assert (found.float_convolutions, found.agreement) == (count, 1.0)


def test_ewgs_in_forward_mode() -> None:
    """rules.md: EWGS depends on the sign of the incoming gradient, which forward mode (`jvp`) does not have: there the
    tangent passes unchanged."""
    x = images()
    _, tangent = torch.func.jvp(lambda each: ewgs_gradient(each, torch.tensor(0.3), 0.1), (x,), (x,))
    assert torch.equal(tangent, x)


def test_a_hook_on_a_block_of_the_float_model(caplog: pytest.LogCaptureFixture) -> None:
    """troubleshooting.md: a hook on a block, set before `prepare`: the graph holds what it computed, and has no call of
    the block."""
    seen: list[int] = []
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Conv2d(4, 4, 3)).eval()
    model[0].register_forward_hook(lambda *_: seen.append(1))
    model[1].register_forward_hook(lambda *_: None)
    prepared = qat.prepare(model, example_inputs=images())
    assert caplog.messages == ["prepare: the graph holds what hooks of '0' computed, and they do not run again"]
    count = len(seen)
    qat.calibrate(prepared, [images()])
    prepared(images())
    assert len(seen) == count


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    """Two convolutions, and what `code` computes of the module and the first one's result."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.norms = nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU())
        self.token = nn.Parameter(torch.ones(1))
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(5))
        self.head(self.code(self, self.stem(IMAGES)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.code(self, self.stem(x)))
        return y


def prepared(model: nn.Module, **recipe: Any) -> Any:
    made = qat.prepare(model, qat.QuantRecipe(**recipe), IMAGES)
    qat.calibrate(made, [IMAGES])
    return made.eval()


def one_for_one(module: Any, y: Tensor) -> Tensor:
    return y * 2 if y.shape[0] == 1 else y


def one_by_one(module: Any, y: Tensor) -> Tensor:
    return torch.stack([y[number] for number in range(y.shape[0])])


def padded(module: Any, y: Tensor) -> Tensor:
    y = nn.functional.pad(y, (0, 0, 0, 1)) if y.shape[2] % 2 else y
    return y.mean((2, 3))


@pytest.mark.parametrize(
    ("code", "shape", "is_free"),
    [
        (lambda _, y: y, (5, 3, 8, 8), True),
        (one_for_one, (3, 3, 8, 8), True), (one_for_one, (1, 3, 8, 8), False), (one_by_one, (3, 3, 8, 8), False),
        (padded, (2, 3, 12, 8), True), (padded, (2, 3, 9, 8), False),
    ],
)  # fmt: skip
def test_sizes_that_decide_are_refused(code: Any, shape: tuple[int, ...], is_free: bool) -> None:
    """models.md: A size that decides nothing stays free, and so does the batch size, unless `forward` decides by it."""
    float_model = Written(code).eval()
    model, x = prepared(float_model), torch.randn(shape)
    if is_free:
        assert model(x).shape == float_model(x).shape
    else:
        with pytest.raises(ValueError, match="the model was prepared for inputs with"):
            model(x)


def test_of_a_container_indices_length_and_iteration_are_left() -> None:
    """models.md: Of a container `[i]`, `len` and `for` are left; assignment, slices and calls are not."""
    model = prepared(Written(lambda _, y: y))
    assert model.stem[0] is model.get_submodule("stem.0") and len(model.stem) == 2
    assert [type(layer) for layer in model.stem] == [qat.QuantConv2d, nn.ReLU]
    with pytest.raises(TypeError, match="does not support item assignment"):
        model.head[1] = nn.Linear(4, 5)
    with pytest.raises(IndexError, match=r"Block has no child slice\(None, 1, None\)"):
        model.stem[:1]
    with pytest.raises(NotImplementedError, match='is missing the required "forward" function'):
        model.stem(IMAGES)
    with pytest.raises(AttributeError, match="no attribute 'append'"):
        model.stem.append(nn.ReLU())


@pytest.mark.parametrize("training", [True, False])
def test_a_patched_forward_passes_the_quantizers_on(training: bool) -> None:
    """models.md: A `forward` that is patched on a quantized layer also gets the layer's quantizers, by name."""
    model = prepared(Written(lambda _, y: y)).train(training)
    before, layer = model(IMAGES), model.head[1]
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs) * 2
    torch.testing.assert_close(model(IMAGES), before * 2)


def test_everything_with_parameters_has_its_line_in_parts_too() -> None:
    """models.md: Everything with parameters has its line; of a model in parts, norms outside of them had none."""
    float_model = Written(lambda m, y: m.norms(y) * m.token * (2 if y.max().item() > 1e9 else 1))
    table = str(qat.summary(prepared(float_model)))
    assert "the model is prepared in parts" in table and ", 2 layers in float" in table
    for name, why in {
        "norms.0": "GroupNorm computes in float", "norms.1": "PReLU computes in float",
        "token": "code that is not traced reads it as a plain tensor",
    }.items():  # fmt: skip
        assert re.search(rf"^{re.escape(name)} .*stays float: {why}$", table, re.MULTILINE), table


@pytest.mark.parametrize("target", ["onnxruntime", "integer_only"])
def test_a_file_has_float_operators_that_no_table_lists(target: str, tmp_path: Path) -> None:
    """targets.md: others (softplus, CELU, `exp`) are float in an ONNX file on every target, `integer_only` too."""
    layers = [layer for each in (nn.Softplus(), nn.CELU(), nn.GELU()) for layer in (nn.Conv2d(3, 3, 1), each)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = prepared(nn.Sequential(*layers, nn.Conv2d(3, 3, 1)), target=target)
    qat.export_onnx(model, tmp_path / "model.onnx", IMAGES)
    assert qat.export.optimized_operators(tmp_path / "model.onnx").keys() >= {"Softplus", "Celu", "Gelu"}
    assert not re.search("softplus|celu", str(qat.summary(model)), re.IGNORECASE)


class Pyramid(nn.Module):
    def __init__(self, out_channels: Any) -> None:
        super().__init__()
        self.out_channels = out_channels
        self.fine, self.coarse = nn.Conv2d(3, 32, 8, stride=8), nn.Conv2d(32, 32, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        fine = self.fine(images).relu()
        return {"fine": fine, "coarse": self.coarse(fine).relu()}


class Network(nn.Module):
    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images: Tensor) -> Any:
        return self.head(list(self.backbone(images).values()))


PROPORTIONAL = {"num_classes": 4, "min_size": 96, "max_size": 128, "score_thresh": 0.0}
ANCHORS = AnchorGenerator(((16,), (32,)), ((1.0,), (1.0,)))
BOTH = {"cls_logits", "bbox_regression"}


@pytest.mark.parametrize(
    ("make", "outputs"),
    [
        (lambda: SSD(Pyramid([32, 32]), DefaultBoxGenerator([[2], [2]]), (96, 128), 4), BOTH),
        pytest.param(
            lambda: FCOS(Pyramid(32), anchor_generator=ANCHORS, **PROPORTIONAL),
            BOTH | {"bbox_ctrness"},
            marks=pytest.mark.slow,
        ),  # RetinaNet is on the page
    ],
    ids=["ssd", "fcos"],
)
def test_a_detectors_file_has_one_image_size_and_any_batch(make: Any, outputs: set[str], tmp_path: Path) -> None:
    """detection.md: A file has one image size, and ONNX Runtime refuses another; the batch is free."""
    image = torch.rand(3, 96, 128)
    model = qat.prepare(make().eval(), example_inputs=([image],))
    qat.calibrate(model, [([image],)])
    assert list(prepared_parts(model)) == ["backbone", "head"]
    network, x = Network(model).eval(), model.transform([image])[0].tensors
    qat.export_onnx(network, tmp_path / "model.onnx", x)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert {end.name for end in session.get_outputs()} == outputs
    name = session.get_inputs()[0].name
    assert all(len(each) == 3 for each in session.run(None, {name: np.concatenate([x.numpy()] * 3)}))
    other = torch.rand(1, 3, 128, 160)
    assert network(other).keys() == outputs and len(model([image, torch.rand(3, 90, 120)])) == 2
    with pytest.raises(Exception, match="invalid dimensions"):
        session.run(None, {name: other.numpy()})


@pytest.mark.parametrize(
    ("layer", "is_written"),
    [(nn.ReLU(), True), (nn.GELU(), True), (nn.Hardswish(), True), (nn.Hardsigmoid(), True), (nn.LeakyReLU(), True),
     (nn.Sigmoid(), False), (nn.Tanh(), False), (nn.Softmax(1), False), (nn.SiLU(), False)],
)  # fmt: skip
def test_what_litert_writes_of_a_run_for_onnxruntime(layer: nn.Module, is_written: bool, tmp_path: Path) -> None:
    """deploying.md: unless it has a SiLU, or a quantizer follows a sigmoid, softmax or tanh."""
    pytest.importorskip("ai_edge_litert")
    file = tmp_path / "model.tflite"
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 1), layer, nn.Conv2d(4, 4, 1)))
    if not is_written:
        with pytest.raises(ValueError, match=r"'1[.\w]*quantizer' .*LiteRT's (LOGISTIC|TANH|SOFTMAX) has the scale 1/"):
            qat.export_litert(model, file, IMAGES)
        if isinstance(layer, nn.SiLU):  # a sigmoid in front of the quantizer of its product
            return
        model = prepared(nn.Sequential(nn.Conv2d(3, 4, 1), layer))  # at its end
    qat.export_litert(model, file, IMAGES)
    assert qat.verify_litert(file, model, [IMAGES]).close == 1


@pytest.mark.parametrize("part", ["weight", "activation"])
def test_what_the_export_alone_refuses(part: str, tmp_path: Path) -> None:
    """targets.md: What is refused, and when (at a recipe, a config or `prepare`: tests/preparation, tests/targets)."""
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), **{part: {"bits": 9}})  # which says nothing
    name = {"weight": "0.weight_quantizer", "activation": "input_quantizer"}[part]
    with pytest.raises(ValueError, match=f"^export_onnx: '{name}' .*at most 8 bits"):
        qat.export_onnx(model, tmp_path / "model.onnx", IMAGES)


def test_litert_warns_of_all_that_it_refuses_if_there_are_example_inputs(recwarn: pytest.WarningsRecorder) -> None:
    """targets.md: one warning that names them all; without `example_inputs`, `prepare` for `litert` says nothing."""
    pytest.importorskip("ai_edge_litert")
    layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ELU(), nn.Conv2d(4, 4, 1), nn.Mish(), nn.Conv2d(4, 4, 1))
    qat.prepare(layers, qat.QuantRecipe(target="litert"))
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"^prepare: export_litert: '1' \(elu\).*'3' \(mish\)"):
        qat.prepare(layers, qat.QuantRecipe(target="litert"), IMAGES)


def test_a_converted_models_biases_are_the_int32_ones_of_the_file(tmp_path: Path) -> None:
    """deploying.md: Its weights are int8, its biases the int32 ones of the file."""
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)))
    qat.export_onnx(model, tmp_path / "model.onnx", IMAGES)
    held = qat.convert(model, "reference").state_dict()
    biases = [tensor for name, tensor in held.items() if name.endswith(".bias")]
    assert all(tensor.dtype == torch.int8 for name, tensor in held.items() if name.endswith(".weight"))
    stored = [
        onnx.numpy_helper.to_array(each) for each in onnx.load(tmp_path / "model.onnx").graph.initializer
        if each.data_type == onnx.TensorProto.INT32
    ]  # fmt: skip
    assert len(biases) == len(stored) == 2 and {bias.dtype for bias in biases} == {torch.int32}
    assert all((bias.numpy().reshape(-1) == kept).all() for bias, kept in zip(biases, stored, strict=True))


@pytest.mark.parametrize("rule", ["lsq", "lsq_plus", "ema", "minmax", "power_of_two", "pact"])
def test_a_range_is_two_numbers(rule: str) -> None:
    """coming_over.md: `model.input_quantizer.set_range(-2.0, 2.0)` instead of `calibrate`."""
    recipe = qat.QuantRecipe(activation={"rule": rule})
    first, second = (qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 1)), recipe, IMAGES) for _ in range(2))
    first.input_quantizer.set_range(-2, 2.0)
    second.input_quantizer.set_range(torch.tensor(-2.0), torch.tensor(2.0))
    assert all(map(torch.equal, first.input_quantizer.grid(), second.input_quantizer.grid()))
