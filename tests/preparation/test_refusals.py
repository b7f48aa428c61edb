"""Models that `prepare` cannot take, and calls that do not fit a prepared one: a sentence each, with the way out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

import qat
from tests.references.prepared_case import refused

ROWS = torch.randn(3, 4)


def imitation(module: str, name: str, base: type[nn.Module] = nn.Module) -> Any:
    """A class that says that it comes from a package which is not installed."""
    return type(name, (base,), {"__module__": module})


FOREIGN = [
    ("torch.ao.nn.qat.modules.conv", "Conv2d"),
    ("brevitas.nn.quant_conv", "QuantConv2d"),
]


@pytest.mark.parametrize(("module", "name"), FOREIGN)
def test_a_model_of_another_toolkit_is_named(module: str, name: str) -> None:
    foreign = imitation(module, name)()
    derived = imitation("my_layers", "Mine", type(foreign))()
    for model, where in (
        (nn.Sequential(nn.Linear(4, 2), foreign), "1"),
        (foreign, "the model"),
        (derived, "the model"),
    ):
        with pytest.raises(ValueError, match=f"^prepare: '{where}' is a {module}.{name}, of another toolkit"):
            qat.prepare(model, example_inputs=ROWS)


def test_a_model_that_torch_ao_only_wraps_in_markers_is_prepared() -> None:
    model = qat.prepare(torch.ao.quantization.QuantWrapper(nn.Linear(4, 2)), example_inputs=ROWS)
    assert isinstance(model.get_submodule("module"), qat.QuantLinear)
    net = nn.Sequential(imitation("torchaolib.nn", "Linear", nn.Linear)(4, 2))
    assert qat.prepare(net, example_inputs=ROWS, dry_run=True)


def test_a_model_that_was_only_fused_says_so() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    with pytest.raises(ValueError, match=r"^prepare: '0' is a torch\.ao\..+\.ConvReLU2d, .+ before fuse_modules"):
        qat.prepare(torch.ao.quantization.fuse_modules(net, [["0", "1", "2"]]), example_inputs=IMAGE)


@pytest.mark.parametrize(
    ("wrap", "attribute"), [(nn.DataParallel, "module"), (AveragedModel, "module"), (torch.compile, "_orig_mod")]
)
def test_a_wrapper_is_named_with_the_model_in_it(wrap: Any, attribute: str) -> None:
    wrapper = wrap(nn.Linear(4, 2))
    with refused(f"prepare: {type(wrapper).__name__} wraps the model; prepare its .{attribute} and wrap again"):
        qat.prepare(wrapper, example_inputs=ROWS)
    assert qat.prepare(getattr(wrapper, attribute), example_inputs=ROWS)


IMAGE = torch.zeros(2, 3, 8, 8)
NOT_RUNNING: list[tuple[Any, str]] = [
    ([IMAGE], "{input: [float32 (2, 3, 8, 8)]}"),
    (IMAGE.numpy(), "{input: ndarray (torch.from_numpy makes it a tensor)}"),
    (IMAGE[:, :2], "{input: float32 (2, 2, 8, 8)}: Given groups=1, "),
]


@pytest.mark.parametrize(("example_inputs", "said"), NOT_RUNNING)
def test_example_inputs_with_which_the_model_does_not_run_are_shown(example_inputs: Any, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 3)), example_inputs=example_inputs)
    sentence = str(refusal.value)
    assert sentence.startswith(f"prepare: Sequential.forward(input) does not run with the example_inputs {said}")
    assert "\n" not in sentence


def test_example_inputs_without_values_are_refused() -> None:
    with refused("prepare: example_inputs do not fit Conv2d.forward: Cannot copy out of meta tensor; no data!"):
        qat.prepare(nn.Conv2d(3, 4, 3), example_inputs=IMAGE.to("meta"))
    with refused("explain: example_inputs do not fit Sequential.forward: missing a required argument: 'input'"):
        qat.explain(two_layers(), {})


class WithLoss(nn.Module):
    """Of the shape that Hugging Face's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classifier = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, pixel_values: Any = None, labels: Any = None, return_dict: Any = None) -> dict[str, Any]:
        logits = self.classifier(F.relu(self.conv(pixel_values)).mean((2, 3)))
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


IMAGES, LABELS = torch.randn(4, 3, 8, 8), torch.arange(4)


@pytest.mark.parametrize("training", [True, False])
def test_a_call_may_leave_out_the_labels_of_the_example_inputs(training: bool) -> None:
    model = qat.prepare(WithLoss(), example_inputs={"pixel_values": IMAGES, "labels": LABELS})
    qat.calibrate(model, {"pixel_values": IMAGES, "labels": LABELS})
    model.train(training)
    assert model(IMAGES, labels=LABELS)["loss"].isfinite()
    expected = model(IMAGES, labels=LABELS)["logits"]
    for answer in (model(IMAGES), model(pixel_values=IMAGES), model(IMAGES, None)):
        assert answer["loss"] is None and torch.equal(answer["logits"], expected)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(IMAGES, label=LABELS)
    with pytest.raises((TypeError, AttributeError), match=r"no attribute|must be Tensor"):
        model("no tensor", LABELS)


def two_layers() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    return qat.prepare(net, example_inputs=IMAGE)


def test_the_table_of_a_model_that_was_never_prepared_says_so() -> None:
    twin = qat.QuantLinear.from_float(nn.Linear(8, 4))
    weights_only = qat.QuantLinear(4, 4, activation_spec=None)
    table = qat.summary(nn.Sequential(twin, weights_only, qat.QuantEmbedding(3, 2), nn.Linear(4, 2))).splitlines()
    assert [" ".join(line.split()[-2:]) for line in table[1:5]] == [
        "input: 0.input_quantizer", "not calibrated", "in float", "input: indices",
    ]  # fmt: skip
    assert table[5].endswith("stays float: it is a layer of torch, and qat.prepare was not called on this model")


def test_a_result_that_cannot_be_copied_is_named() -> None:
    """Point 47: torch's deepcopy said that one is there, and not which."""
    model = nn.Sequential(nn.Linear(4, 2))
    model.cache = {"last": [model[0].weight * 2]}  # type: ignore[assignment]
    said = (
        "prepare: {} holds a result with gradients, which cannot be copied: detach it, or compute it in forward; norms"
        " of weights are in torch.nn.utils.parametrizations"
    )
    with refused(said.format("cache")):
        qat.prepare(model, example_inputs=ROWS)
    with pytest.warns(FutureWarning), refused(said.format("0.weight")):
        qat.prepare(nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 2))), example_inputs=ROWS)


class Scaled(nn.Sequential):
    """A model whose call has an argument more than its forward."""

    def __call__(self, x: torch.Tensor, scale: float = 2.0) -> Any:
        return super().__call__(x * scale)


def test_a_call_of_its_own_is_kept() -> None:
    """Point 47: the graph of forward alone stood in its place."""
    model, x = Scaled(nn.Linear(4, 2)).eval(), torch.randn(8, 4)
    quantized = qat.prepare(model, example_inputs=x)
    qat.calibrate(quantized, [x])
    assert "overrides __call__" in qat.summary(quantized)
    for scale in (2.0, 1.0):
        assert (quantized(x, scale) - model(x, scale)).abs().max() < 0.1
    assert not torch.allclose(quantized(x), quantized(x, 1.0))
