"""Models that `prepare` takes in parts or not at all, and calls that do not fit: a sentence each, with the way out."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.optim.swa_utils import AveragedModel

import qat
from qat.layers import QuantLayer
from qat.preparation.parts import prepared_parts
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from qat.quantizer import Quantizer
from tests.references import prepared_case as checks
from tests.references.prepared_case import Plain, assert_computes_as, draw, prepared_alike, refused

ROWS = torch.randn(3, 4)


def imitation(module: str, name: str, base: type[nn.Module] = nn.Module) -> Any:
    """A class that says that it comes from a package which is not installed."""
    return type(name, (base,), {"__module__": module})


FOREIGN = [("torch.ao.nn.qat.modules.conv", "Conv2d"), ("brevitas.nn.quant_conv", "QuantConv2d")]


@pytest.mark.parametrize(("module", "name"), FOREIGN)
def test_a_model_of_another_toolkit_is_named(module: str, name: str) -> None:
    foreign = imitation(module, name)()
    derived = imitation("my_layers", "Mine", type(foreign))()
    for model, where in ((nn.Sequential(foreign), "0"), (foreign, "the model"), (derived, "the model")):
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


@pytest.mark.parametrize(("wrap", "attribute"), [
    (nn.DataParallel, "module"),
    (AveragedModel, "module"),
    (torch.compile, "_orig_mod"),
])  # fmt: skip
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
def test_example_inputs_that_do_not_run_are_shown(example_inputs: Any, said: str) -> None:
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


def with_loss(self: Any, pixel_values: Any = None, labels: Any = None, return_dict: Any = None) -> dict[str, Any]:
    """Of the shape that Hugging Face's models have."""
    logits = self.classifier(F.relu(self.conv(pixel_values)).mean((2, 3)))
    return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


PHOTOS, LABELS = torch.randn(4, 3, 8, 8), torch.arange(4)


@pytest.mark.parametrize("training", [True, False])
def test_a_call_may_leave_out_the_labels_of_the_example_inputs(training: bool) -> None:
    net = Plain(with_loss, conv=nn.Conv2d(3, 8, 3), classifier=nn.Linear(8, 4))
    model = qat.prepare(net, example_inputs={"pixel_values": PHOTOS, "labels": LABELS})
    qat.calibrate(model, {"pixel_values": PHOTOS, "labels": LABELS})
    model.train(training)
    assert model(PHOTOS, labels=LABELS)["loss"].isfinite()
    expected = model(PHOTOS, labels=LABELS)["logits"]
    for answer in (model(PHOTOS), model(pixel_values=PHOTOS), model(PHOTOS, None)):
        assert answer["loss"] is None and torch.equal(answer["logits"], expected)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(PHOTOS, label=LABELS)
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
        " of weights are in torch.nn.utils.parametrizations, and torch.nn.utils.prune.remove makes a"
        " pruned weight a parameter again"
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


class Detector(nn.Module):
    """Like detection models: images in a list, decisions on values, a body and heads that can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.body.out_channels = 4
        self.heads = nn.ModuleDict({"box": nn.Sequential(nn.Flatten(), nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 4))})
        self.score = nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.hooked = nn.Linear(4, 4)
        self.hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
        self.unused = nn.Linear(4, 4)

    def forward(self, images: list[Tensor], targets: list[int] | None = None) -> dict[str, Tensor]:
        x = self.body(torch.stack(images))
        if not bool(x.isfinite().all()):
            raise RuntimeError("not finite")
        tokens = x.flatten(2).mT
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        pooled = tokens.mean(1) * self.body.out_channels
        found = {"boxes": self.heads["box"](x), "scores": self.score(self.hooked(pooled))}
        return {**found, "loss": found["scores"].square().mean()} if self.training and targets is not None else found


IMAGES = [draw(3, 8, 8, seed=1), draw(3, 8, 8, seed=2)]


def test_the_largest_parts_that_can_be_traced_are() -> None:
    net = Detector().eval()
    model = qat.prepare(net, example_inputs=(IMAGES,))
    assert list(prepared_parts(model)) == ["body", "heads.box"]
    assert all(isinstance(part, fx.GraphModule) for part in prepared_parts(model).values())
    assert notes_of(model, LEFT_IN_FLOAT) == {
        "(the model)": "prepared in parts, since Detector cannot be captured: the way through it depends on the values"
        f" of a tensor (test_refusals.py, line {Detector.forward.__code__.co_firstlineno + 2}); torch.where(condition,"
        " a, b) takes both ways",
        "hooked": "it carries forward hooks, which the twin would lose",
        "unused": "forward never calls it for the example inputs",
    }
    # Within a part, tensors are quantized at their producers; a single layer quantizes its input.
    names = checks.activation_quantizers(model)
    assert {"body.input_quantizer", "body.0_quantizer", "score.input_quantizer"} <= set(names)
    assert isinstance(model.get_submodule("attention.out_proj"), QuantLayer)
    assert not isinstance(model.get_submodule("hooked"), QuantLayer)


@pytest.mark.parametrize("example_inputs", [(IMAGES,), None], ids=["example", "no example"])
def test_a_model_in_parts_computes_as_the_float_model(example_inputs: Any) -> None:
    net = Detector().eval()
    before = copy.deepcopy(net.state_dict())
    model = qat.prepare(net, example_inputs=example_inputs)
    assert type(model) is Detector and model is not net
    assert_computes_as(net, model, IMAGES)
    # The rest of the model still decides and branches at every call: training with targets gives a loss.
    assert set(checks.without_quantizers(model).train()(IMAGES, [1])) == {"boxes", "scores", "loss"}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(isinstance(module, (Quantizer, QuantLayer, fx.GraphModule)) for module in net.modules())


class Counts(nn.Module):
    """Picklable; it decides on a value, and uses one body under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.again = self.body
        self.inner = nn.ModuleList([nn.Linear(8, 8), self.body])
        self.steps = 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps + int(x.sum() > 1e9)):
            x = self.inner[1](self.inner[0](self.again(self.body(x))))
        return x


def test_a_part_under_several_names_stays_one_part() -> None:
    x = draw(4, 8)
    model = prepared_alike(Counts().eval(), x)
    assert model.again is model.body and model.inner[1] is model.body
    assert sum(isinstance(module, QuantLayer) for module in model.modules()) == 2
    assert not any(type(module) is nn.Linear for module in model.modules())
    qat.calibrate(model, [x])
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_names_in_a_recipe_are_those_of_the_whole_model() -> None:
    overrides = {
        "body.3": {"skip": True},
        "heads.box.1": {"weight": {"bits": 4}, "activation": {"bits": 6}},
        "score": {"weight": {"bits": 3}, "activation": {"bits": 5}},
    }
    model = qat.prepare(Detector(), qat.QuantRecipe(overrides=overrides), example_inputs=(IMAGES,))
    assert notes_of(model, LEFT_IN_FLOAT)["body.3"] == "skipped by the recipe's pattern 'body.3'"
    box = model.get_submodule("heads.box")
    assert box.get_submodule("1").weight_quantizer.spec.bits == 4 and box.input_quantizer.spec.bits == 6
    assert model.score.weight_quantizer.spec.bits == 3 and model.score.input_quantizer.spec.bits == 5
    sentence = "prepare: the recipe's pattern 'heads.bx.*' names no layer of the model; did you mean"
    with refused(f"{sentence} 'heads.box.3' or 'heads.box.1'?"):
        qat.prepare(Detector(), qat.QuantRecipe(overrides={"heads.bx.*": {"skip": True}}), example_inputs=(IMAGES,))


class Head(nn.Sequential):
    """A head that also computes its loss, like RetinaNet's."""

    def compute_loss(self, scores: Tensor) -> Tensor:
        return scores.square().mean()


def test_a_part_whose_methods_others_call_keeps_them() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            return x
        scores = self.head(x)
        return self.head.compute_loss(scores) if self.training and bool(scores.isfinite().all()) else scores.relu()

    model = prepared_alike(Plain(forward, head=Head(nn.Linear(8, 4))).eval(), draw(4, 8))
    assert isinstance(model.get_submodule("head.0"), QuantLayer)


VALUES: list[Any] = [
    lambda self, x: self.a(x) if x.sum() > 0 else self.b(x),
    lambda self, x: self.a(x) * float(x.abs().max()),
    lambda self, x: self.a(x) * torch.tensor(x.tolist()).max(),
]


@pytest.mark.parametrize("forward", VALUES)
def test_control_flow_on_values_is_decided_at_every_call(forward: Any) -> None:
    net = Plain(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    model = prepared_alike(net, draw(4, 8).abs())
    assert any(isinstance(module, QuantLayer) for module in model.modules())
    for x in (-draw(4, 8).abs(), draw(4, 8, seed=3)):
        assert_computes_as(net, model, x)
