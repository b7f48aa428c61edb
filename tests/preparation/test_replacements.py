"""Changes to a prepared model: replaced modules, hooks, features, modes, checkpointing."""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.kernels import plain_formulas
from qat.kernels.cpu import compiler
from qat.preparation.prepared_graph import PreparedGraph
from tests.references.cases_fused import assert_same, images, results
from tests.references.prepared_case import Plain, refused

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


class Net(nn.Module):
    """Every kind of module that a user may want to replace."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.act, self.pool, self.gelu = nn.ReLU6(), nn.MaxPool2d(2), nn.GELU()
        self.conv2, self.block = nn.Conv2d(16, 16, 3, padding=1), nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU())
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.bn1(self.conv1(x))))
        return self.fc(self.block(self.gelu(self.conv2(x))).mean((2, 3)))  # type: ignore[no-any-return]


def prepared(x: Tensor, net: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    model = qat.prepare(net(), example_inputs=x)
    qat.calibrate(model, [x])
    model.train()
    model(x)  # derives the fused graph from the present model
    return model


@pytest.fixture
def x() -> Tensor:
    return images()


@pytest.fixture
def model(x: Tensor) -> Any:
    return prepared(x)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another activation": lambda m: setattr(m, "act", nn.SiLU()),
    "a bound": lambda m: setattr(m.act, "max_val", 0.5),
    "a patched activation": lambda m: setattr(m.act, "forward", lambda x: x.clamp(0, 0.3)),
    "a head": lambda m: setattr(m, "fc", nn.Linear(16, 7)),
    "another norm": lambda m: setattr(m, "bn1", nn.GroupNorm(4, 16)),
    "a float layer": lambda m: setattr(m, "conv2", nn.Conv2d(16, 16, 3, padding=1)),
    "a quantizer": lambda m: setattr(m, "conv2_quantizer", nn.Identity()),
    "a frozen layer": lambda m: m.conv2.eval(),
    "in a sequential": lambda m: setattr(m.block, "1", nn.Hardtanh(-0.1, 0.1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_preparation_is_followed_in_both_modes(x: Tensor, name: str) -> None:
    model, untouched = prepared(x), prepared(x)
    torch.manual_seed(1)
    CHANGES[name](model)
    plain, fast, before = results(model, x, True), results(model, x, False), results(untouched, x, False)
    torch.testing.assert_close(fast["y"], plain["y"], rtol=1e-4, atol=1e-4)
    if "frozen" not in name:
        assert before["y"].shape != fast["y"].shape or not torch.allclose(before["y"], fast["y"], atol=1e-4)
    in_training = copy.deepcopy(model)(x)
    gap = (model.eval()(x) - in_training).abs().max()
    assert gap < 0.6 * in_training.abs().max()  # evaluation has other statistics, and the same modules


def test_a_part_that_comes_back_is_quantized_again(x: Tensor, model: Any) -> None:
    expected = results(model, x, False)
    layer, norm = model.conv2, model.bn1
    model.conv2, model.bn1 = nn.Conv2d(16, 16, 3, padding=1), nn.Identity()
    model(x)
    model.conv2, model.bn1 = layer, norm
    model(x)
    again = results(model, x, False)
    assert torch.equal(again["y"], expected["y"])
    assert "norm" in next(str(node.kwargs) for node in model.graph.nodes if node.target == "conv1")


def test_the_summary_names_what_was_put_in(model: Any) -> None:
    model.fc = nn.Linear(16, 7)
    assert any("fc " in line and "it was put there after the model was prepared" in line
               for line in qat.summary(model).splitlines())  # fmt: skip


def test_a_hook_that_changes_what_a_layer_answers_acts(x: Tensor, model: Any) -> None:
    model.conv2.register_forward_hook(lambda module, inputs, y: y * 0.5)
    assert_same(model, x)


def test_a_hook_on_a_block_is_named_since_it_never_fires(x, model, caplog):
    seen: list[Any] = []
    model.block.register_forward_hook(lambda *_: seen.append(1))
    with caplog.at_level(logging.WARNING, "qat"):
        model(x)
        model.eval()(x)
    assert caplog.messages == [
        "a hook or a patched forward of 'block' never runs, for a prepared model calls the layers in it and not itself;"
        " take its features with qat.feature_extractor(model, ['block'])"
    ]
    assert not seen


def test_features_are_what_the_next_layer_reads_and_learn(x: Tensor, model: Any) -> None:
    features = qat.feature_extractor(model, {"block": "block", "bn1": "stem", "fc": "scores", "pool": "pooled"})
    assert isinstance(features, PreparedGraph)
    features.eval(), model.eval()
    found = features(x)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    assert shapes == {"block": (8, 16, 8, 8), "stem": (8, 16, 16, 16), "scores": (8, 5), "pooled": (8, 16, 8, 8)}
    assert torch.equal(found["scores"], model(x))
    assert dict(features.named_parameters())["conv1.weight"] is model.conv1.weight
    features.train()
    sum(tensor.square().mean() for tensor in features(x).values()).backward()  # type: ignore[union-attr]
    assert model.conv1.weight.grad is not None


def test_mistakes_about_features_are_sentences(model: Any) -> None:
    with refused("feature_extractor: nothing runs in 'blok'; did you mean 'block' or 'block.1' or 'block.0'?"):
        qat.feature_extractor(model, ["blok"])
    with pytest.raises(ValueError, match="several names have one key"):
        qat.feature_extractor(model, {"conv1": "a", "conv2": "a"})
    with pytest.raises(TypeError, match=r"^feature_extractor: Net has no one graph; give it a model from qat\.prepare"):
        qat.feature_extractor(Net(), ["block"])


def test_a_norm_that_trains_in_an_evaluated_model_estimates(x: Tensor, model: Any) -> None:
    model.eval()
    model.bn1.reset_running_stats()
    model.bn1.train()
    model.bn1.momentum = None
    with torch.no_grad():
        model(x)
    stem = F.conv2d(x, model.conv1.weight, model.conv1.bias, padding=1)
    torch.testing.assert_close(model.bn1.running_mean, stem.mean((0, 2, 3)).detach(), rtol=0.05, atol=0.02)
    assert int(model.bn1.num_batches_tracked) == 1


def test_compiled_code_watches_what_it_was_derived_from() -> None:
    x = images(count=2, size=8)
    model = prepared(x)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    model.act.max_val = 0.4
    with plain_formulas():
        expected = copy.deepcopy(model)(x)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-2, atol=1e-2)


def residual() -> nn.Module:
    """A tensor with two consumers; f is the first layer's output."""

    def forward(self: Any, x: Tensor) -> Any:
        f = self.a(x)
        y = F.relu(f)
        return self.c(F.relu(self.b(self.act(y)) + y)), f

    return Plain(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 8, 1), c=nn.Conv2d(8, 4, 3), act=nn.ReLU())


def halve(_: nn.Module, args: tuple[Tensor]) -> None:
    args[0].mul_(0.5)


WRITES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda m: m.b.register_forward_pre_hook(halve),
    "a module": lambda m: setattr(m, "act", Plain(lambda self, x: x.clamp_(0.1, 0.3))),
}


@pytest.mark.parametrize("write", WRITES)
def test_who_writes_into_what_a_sum_reads_is_seen_by_it(x: Tensor, write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAT_SELF_CHECK", "off")
    model = prepared(x, residual)
    WRITES[write](model)
    found = model(x)[0]
    with plain_formulas():
        expected = model(x)[0]
    assert torch.allclose(found, expected, atol=1e-5)
    net = residual()
    net.load_state_dict({name: value for name, value in model.state_dict().items() if name in net.state_dict()})
    WRITES[write](net)
    with torch.no_grad():
        assert (found - net(x)[0]).norm() < 0.1 * found.norm()


def test_a_pickle_keeps_what_a_layer_was_handed(x: Tensor, model: Any) -> None:
    own, model.conv2 = model.conv2, nn.Conv2d(16, 16, 3, padding=1)
    model(x)
    again = pickle.loads(pickle.dumps(model))
    for each in (model, again):
        each.conv2 = own
        each.train()(x)
        (call,) = [node for node in each.graph.nodes if node.target == "conv2"]
        assert set(call.kwargs) == {"input_quantizer"}
    features = [qat.feature_extractor(each, ["block"]).eval()(x)["block"] for each in (model, again)]
    assert torch.equal(*features)


def test_a_block_that_was_replaced_is_a_sentence(x: Tensor, model: Any) -> None:
    model.block = nn.Identity()
    with pytest.raises(ValueError, match=r"^'block\.0' is called by the prepared model, and is gone"):
        model(x)


STRANGE: dict[str, Callable[[Any], Any]] = {
    "strided": lambda m: setattr(m.conv1.weight_quantizer, "smallest_scale",
                                 torch.stack([m.conv1.weight_quantizer.smallest_scale] * 2, -1)[..., 0]),
    "per channel": lambda m: setattr(m.conv2_quantizer, "scale", nn.Parameter(torch.rand(16, 1, 1) + 0.1)),
    "a bias per sample": lambda m: setattr(m.fc, "bias", nn.Parameter(torch.randn(6, 5))),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_that_kernels_do_not_take_train_plainly(x: Tensor, model: Any, kind: str) -> None:
    x = x.repeat(6, 1, 1, 1)[:6]
    STRANGE[kind](model)
    plain, fast = (results(model, x, formula) for formula in (True, False))
    assert all(torch.allclose(plain[name], fast[name], atol=1e-3) for name in plain)


def test_hooks_that_the_file_does_not_hold_are_named(x: Tensor, model: Any, tmp_path: Path) -> None:
    model.eval()
    model.conv1.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="hooks and patched methods of conv1 are left out"):
        qat.export_onnx(model, tmp_path / "model.onnx", x)


def test_a_number_that_forward_read_is_said_to_be_fixed(x: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    model = prepared(x, lambda: Plain(lambda self, x: self.net(x) * self.alpha, net=Net(), alpha=0.5))
    model.alpha, model.seen = 0.7, 3
    caplog.clear()
    with caplog.at_level(logging.WARNING, "qat"):
        model(x), model(x)
    assert caplog.messages == [
        "'alpha' changed, and what forward computed from it is fixed since the model was prepared; prepare it again if"
        " it reads that"
    ]


def test_a_dropout_that_became_a_clip_keeps_no_grid() -> None:
    """Evaluation rounded 0.3 to a level, and the exported file did not."""
    x = torch.randn(6, 8)
    net = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.0), nn.Linear(4, 3))
    model = qat.prepare(net.eval(), example_inputs=x)
    qat.calibrate(model, [x])
    model.set_submodule("1", nn.Hardtanh(-0.3, 0.3))
    with torch.no_grad():
        expected = model.train()(x)
        torch.testing.assert_close(model.eval()(x), expected)
    with pytest.raises(ValueError, match=r"'2' \(QuantLinear\) has no grid for its input"):
        qat.convert(model)


def test_an_activation_taken_apart_is_not_replaced_in_silence() -> None:
    x = torch.randn(4, 3, 8, 8)
    model = qat.prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.GroupNorm(2, 8)), example_inputs=x)
    qat.calibrate(model, [x])
    model(x)
    copy.deepcopy(model)(x)
    model.set_submodule("1", nn.GELU())
    with pytest.raises(ValueError, match=r"^'1' is called by the prepared model, and is gone; replace layers one by"):
        model(x)
