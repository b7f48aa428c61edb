"""`prepare`: its result, what stays float and why, and what it refuses."""

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import DeformConv2d

import qat
from qat.layers import QuantLayer
from qat.quantizer import Quantizer, create_quantizer, registered_quantizers
from qat.workflow import probe
from tests.references.prepared_case import Net, Plain, assert_takes_float_state, refused

IMAGES = torch.randn(2, 3, 8, 8)


def test_the_float_model_is_untouched_and_its_keys_stay() -> None:
    net = Net().eval()
    before = copy.deepcopy(net.state_dict())
    model = qat.prepare(net, example_inputs=IMAGES)
    assert not any(isinstance(module, (Quantizer, QuantLayer)) for module in net.modules())
    qat.calibrate(model, [IMAGES])
    with torch.no_grad():
        model.stem.weight.add_(1)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    assert set(before) < set(model.state_dict())
    assert_takes_float_state(model, before)
    assert not model.training and model.block.bn1 is model.get_submodule("block.bn1")


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt", "integer_only"])
def test_the_summary_names_what_computes_in_float_between_layers(target: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1))
    profile = qat.targets.profile_of(target)
    model = qat.prepare(nn.Sequential(net, nn.Sigmoid()), qat.QuantRecipe(target=target), IMAGES)
    said = [line for line in qat.summary(model).splitlines() if "between the layers" in line]
    named = {"onnxruntime": "2 hardswish", "tensorrt": "2 hardswish, 1 sigmoid"}.get(target)
    reason = profile.reasons["float_operations"].text
    assert said == ([f"{target} computes {named} between the layers in float: {reason}"] if named else [])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: qat.prepare(Net(), IMAGES),
            "prepare: recipe must be a QuantRecipe, got Tensor; inputs are given by name, prepare(model,"
            " example_inputs=...)",
        ),
        (
            lambda: qat.prepare(nn.Sequential(nn.ReLU()), example_inputs=IMAGES),
            "prepare: Sequential has no layer to quantize",
        ),
        (
            lambda: qat.prepare(Net(), qat.QuantRecipe(overrides={"block.cnv1": {"skip": True}}), IMAGES),
            "prepare: the recipe's pattern 'block.cnv1' names no layer of the model; did you mean 'block.conv1' or"
            " 'block.conv2'?",
        ),
        (
            lambda: qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(rule="lqs")), IMAGES),
            f"prepare: stem (weight): unknown quantizer 'lqs'; registered: {', '.join(registered_quantizers())};"
            " did you mean 'lsq'?",
        ),
        (
            lambda: qat.prepare(
                Net(), qat.QuantRecipe(weight=qat.QuantSpec(granularity="group", group_size=2)), IMAGES
            ),
            "prepare: stem (weight): group_size=2 does not divide the weight's 3 inputs; use 1, 3",
        ),
    ],
)  # fmt: skip
def test_errors_are_sentences(make: Callable[[], Any], sentence: str) -> None:
    with refused(sentence, (ValueError, TypeError)):
        make()


def test_the_probe_names_quantizers_that_never_run() -> None:
    model = qat.prepare(Net(), example_inputs=IMAGES)
    model.add_submodule("orphan", create_quantizer(qat.QuantSpec()))
    with pytest.raises(ValueError, match=r"^prepare: these quantizers never run: orphan$"):
        probe(model, {"x": IMAGES}, set())


@pytest.mark.filterwarnings("ignore:a quantizer")
def test_summary_lists_every_layer_in_order() -> None:
    model = qat.prepare(Net(), example_inputs=IMAGES)
    lines = qat.summary(model).splitlines()
    names = [line.split()[0] for line in lines[1:-2]]
    assert names == [
        "input_quantizer", "stem", "stem_quantizer", "block.conv1", "block.conv1_quantizer", "block.conv2",
        "block.conv2_quantizer", "block.add_quantizer", "adaptive_avg_pool2d_quantizer", "fc",
    ]  # fmt: skip
    assert lines[1].endswith("not calibrated")
    assert lines[4].endswith("input: stem_quantizer, folds block.bn1")
    qat.calibrate(model, [IMAGES])
    assert "not calibrated" not in qat.summary(model)


def test_a_weights_grid_without_negatives_refuses_negative_weights() -> None:
    with pytest.raises(ValueError, match=r"^prepare: stem \(weight\): values down to -\d\.\d+, which its grid"):
        qat.prepare(Net(), qat.QuantRecipe(weight=qat.QuantSpec(signed=False)), IMAGES)


def test_answers_that_activations_wrote_share_no_memory() -> None:
    """The quantizer of a tensor that an in-place activation changes, and that the model returns, is read."""

    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        y = self.a(x)
        return {"0": y, "1": self.b(y)}

    blocks = {
        name: nn.Sequential(nn.Conv2d(inputs, 8, 1), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
        for name, inputs in (("a", 3), ("b", 8))
    }
    model: Any = qat.prepare(Plain(forward, **blocks), example_inputs=torch.randn(2, 3, 4, 4))
    calls = [node for node in model.graph.nodes if str(node.target).endswith("_quantizer") and node.op == "call_module"]
    assert len(calls) == 4 and all(node.users for node in calls)


def test_the_summary_names_each_norm_and_layers_without_a_twin() -> None:
    """Point 26: it named one norm of several, "floordiv reads it", and 0 layers in float."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        found: Tensor = self.n1(self.head(y)) + self.n2(self.head(self.deform(y, self.offset(y))))
        return found

    net = Plain(
        forward, a=nn.Conv2d(3, 4, 3), offset=nn.Conv2d(4, 18, 3, padding=1), head=nn.Conv2d(4, 2, 1),
        deform=DeformConv2d(4, 4, 3, padding=1), n1=nn.BatchNorm2d(2), n2=nn.BatchNorm2d(2),
    )  # fmt: skip
    table = qat.summary(qat.prepare(net, example_inputs=torch.randn(2, 3, 8, 8)))
    assert "input: a_quantizer, folds n1; input: deform.deform_conv2d_quantizer, folds n2" in table
    assert "stays float: deform_conv2d reads its weight as a plain tensor" in table
    assert "1 layer in float" in table and "floordiv" not in table


@pytest.mark.parametrize("ambient", [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode])
def test_ranges_and_files_do_not_depend_on_autocast_and_inference_mode(ambient: Any, tmp_path: Path) -> None:
    """Point 31: other ranges, a file of bfloat16 that no runtime reads, and training that ends in torch's words."""
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    found = []
    for context in (nullcontext, ambient):
        with context():
            prepared = qat.prepare(model, example_inputs=x)
            qat.calibrate(prepared, [x])
            qat.export_onnx(prepared, tmp_path / "model.onnx", x)
            assert qat.export.verify_onnx(tmp_path / "model.onnx", prepared, [x]).close
            answer = qat.convert(prepared)(x)
        assert prepared.training
        prepared(x).sum().backward()
        found.append((answer, (tmp_path / "model.onnx").read_bytes()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_an_optimizer_of_the_float_model_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """Point 47: it trained nothing, and nothing said so."""
    net, x = Net(), torch.randn(2, 3, 8, 8)
    for model_of, said in ((lambda model: net, 1), (lambda model: model, 0)):
        model = qat.prepare(net, example_inputs=x)
        qat.calibrate(model, [x])
        optimizer = torch.optim.SGD(model_of(model).parameters(), lr=0.1)
        with caplog.at_level(logging.WARNING, "qat"):
            for _ in range(2):
                model.train()
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                model.eval()(x)
        assert sum("made before qat.prepare" in each for each in caplog.messages) == 2 * said
        caplog.clear()
