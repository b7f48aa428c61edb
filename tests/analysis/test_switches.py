"""`disable_fake_quant`, `enable_fake_quant`, `freeze_scales`: what they switch, and who respects it."""

import copy
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.kernels import plain_formulas
from qat.quantizer import Quantizer
from tests.references.cases_fused import assert_same, counted, images, prepared
from tests.references.nets import Block
from tests.references.prepared_case import refused

__all__ = ["counted"]  # a fixture


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return prepared(Block(), images())


def off(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if isinstance(each, Quantizer) and each.is_disabled}


@pytest.mark.parametrize(
    ("layers", "roles", "expected"),
    [
        ("conv2", {}, {"conv2.weight_quantizer", "conv1_quantizer"}),
        ("conv2", {"activations": False}, {"conv2.weight_quantizer"}),
        ("conv2", {"weights": False}, {"conv1_quantizer"}),
        (["head", "mean_quantizer"], {}, {"head.weight_quantizer", "mean_quantizer"}),
        ([nn.Linear, "conv2"], {"activations": False}, {"head.weight_quantizer", "conv2.weight_quantizer"}),
        ("conv[12]", {"activations": False}, {"conv1.weight_quantizer", "conv2.weight_quantizer"}),
    ],
)
def test_patterns_name_layers_and_quantizers(
    model: nn.Module, layers: Any, roles: dict[str, bool], expected: set[str]
) -> None:
    qat.disable_fake_quant(model, layers, **roles)
    assert off(model) == expected
    qat.enable_fake_quant(model, layers, **roles)
    assert off(model) == set()


def test_without_a_pattern_everything_is_off_and_the_model_is_the_float_model() -> None:
    float_model, x = Block(), images()
    model = prepared(float_model, x)
    qat.disable_fake_quant(model)
    assert off(model) == {name for name, each in model.named_modules() if isinstance(each, Quantizer)}
    for mode in (True, False):
        expected = copy.deepcopy(float_model).train(mode)(x)
        torch.testing.assert_close(copy.deepcopy(model).train(mode)(x), expected, rtol=1e-5, atol=1e-5)
    qat.enable_fake_quant(model)
    assert (model.eval()(x) - float_model.eval()(x)).abs().max() > 1e-3


INDICES = torch.arange(6).reshape(2, 3)
ALONE = {
    "linear": (lambda: qat.QuantLinear(4, 3), (torch.randn(5, 4),)),
    "convolution": (lambda: qat.QuantConvTranspose2d(4, 6, 3, groups=2), (torch.randn(2, 4, 5, 5),)),
    "embedding": (lambda: qat.QuantEmbedding(9, 4), (INDICES,)),
    "sparse embedding": (lambda: qat.QuantEmbedding(9, 4, sparse=True), (INDICES,)),
    "lstm": (lambda: qat.QuantLSTM(4, 3), (torch.randn(5, 2, 4),)),
    "attention": (lambda: qat.QuantMultiheadAttention(4, 2), (torch.randn(5, 2, 4),) * 3),
}


@pytest.mark.parametrize(("make", "inputs"), ALONE.values(), ids=ALONE.keys())
def test_every_kind_of_layer_computes_in_float(make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]) -> None:
    layer = make()
    if inputs[0].is_floating_point():
        qat.calibrate(layer, [(inputs, 0)])
    float_layer = layer.to_float()
    qat.disable_fake_quant(layer)
    for mode in (True, False):
        y, expected = (first(each.train(mode)(*inputs)) for each in (layer, float_layer))
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    y.sum().backward()
    parameter = next(layer.parameters())
    assert parameter.grad is not None and parameter.grad.is_sparse == getattr(layer, "sparse", False)


def first(y: Tensor | tuple[Tensor, ...]) -> Tensor:
    return y if isinstance(y, Tensor) else y[0]


def test_a_context_puts_back_what_was_before(model: nn.Module) -> None:
    qat.disable_fake_quant(model, "head", activations=False)
    with pytest.raises(KeyError), qat.disable_fake_quant(model):
        with qat.enable_fake_quant(model, ["head", "conv1"]):
            assert off(model).isdisjoint({"head.weight_quantizer", "conv1.weight_quantizer", "input_quantizer"})
        assert "head.weight_quantizer" in off(model) and "input_quantizer" in off(model)
        raise KeyError
    assert off(model) == {"head.weight_quantizer"}


def test_training_leaves_the_codes_for_these_layers_alone(model: nn.Module, counted: list[str]) -> None:
    model(images())
    before, counted[:] = counted.count("CodesProductFunction"), []
    with qat.disable_fake_quant(model, "conv2", activations=False):
        model(images())
        assert counted.count("CodesProductFunction") == before - 1
        assert_same(model, images())
        rows = [re.split(r"\s{2,}", line) for line in qat.explain(model).splitlines()]
        assert ["operation by operation", "its weight_quantizer: it is switched off"] in [row[2:] for row in rows]
        assert "folds bn2; switched off" in qat.summary(model)
        last = "the model has 1 quantizer switched off; qat.explain says how it trains now"
        assert qat.summary(model).endswith(last)
    counted.clear()
    model(images())
    assert counted.count("CodesProductFunction") == before


def test_compiled_code_follows_the_switch(model: nn.Module) -> None:
    torch.compiler.reset()
    model.eval()
    compiled, x = torch.compile(model, backend="eager"), images()
    with torch.no_grad():
        for switch in (qat.enable_fake_quant, qat.disable_fake_quant, qat.enable_fake_quant):
            switch(model)
            assert torch.equal(compiled(x), model(x))


def test_a_copy_and_a_loaded_state_compute_the_same(model: nn.Module) -> None:
    qat.disable_fake_quant(model, ["conv2", "head"])
    loaded = qat.prepare(Block(), example_inputs=images())
    loaded.load_state_dict(model.state_dict())
    for other in (loaded, copy.deepcopy(model)):
        assert off(other) == off(model)
        assert torch.equal(other.eval()(images()), model.eval()(images()))


def test_ewgs_leaves_what_is_off_alone() -> None:
    torch.manual_seed(0)
    grid = {"ewgs": "hessian", "granularity": "channel", "narrow_range": True, "bits": 4}
    model = prepared(Block(), images(), qat.QuantRecipe(weight=qat.QuantSpec(**grid)))
    with qat.disable_fake_quant(model, "conv2"):
        deltas = qat.update_ewgs(model, lambda net, batch: net(batch).square().mean(), [images()])
    assert [*deltas] == [f"{name}.weight_quantizer" for name in ("conv1", "conv3", "head")]
    assert all(torch.tensor([*deltas.values()]).isfinite())


def test_integers_of_what_is_off_are_refused(model: nn.Module, tmp_path: Path) -> None:
    qat.disable_fake_quant(model, "head", weights=False)
    way = "call qat.enable_fake_quant(model) first, or prepare the model with a recipe that skips the layer"
    with refused(f"export_onnx: 'mean_quantizer' is switched off; {way}"):
        qat.export_onnx(model, tmp_path / "model.onnx", images())
    with refused(f"integer_weights: 'mean_quantizer' is switched off; {way}"):
        qat.integer_weights(model)


def test_calibrate_sets_what_is_off_and_leaves_what_is_frozen(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    before = {name: each.scale.clone() for name, each in model.named_modules() if isinstance(each, Quantizer)}
    model.conv1.weight_quantizer.freeze()
    model.mean_quantizer.freeze()
    qat.disable_fake_quant(model, "conv2")
    with torch.no_grad():
        for layer in (model.conv1, model.conv2):
            layer.weight.mul_(2)
    with caplog.at_level(logging.WARNING, "qat"):
        qat.calibrate(model, [3 * images()])
    same = {name for name, old in before.items() if torch.equal(model.get_submodule(name).scale, old)}
    assert same == {"conv1.weight_quantizer", "mean_quantizer", "conv3.weight_quantizer", "head.weight_quantizer"}
    assert off(model) == {"conv2.weight_quantizer", "conv1_quantizer"}
    assert (
        "calibrate: 2 frozen ranges stay as they are (conv1.weight_quantizer, mean_quantizer);"
        " qat.freeze_scales(model, False) lets them go"
    ) in caplog.messages


@pytest.mark.parametrize("plain", [False, True], ids=["codes", "plain"])
@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW])
def test_frozen_scales_stay_while_weights_learn(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], plain: bool, counted: list[str]
) -> None:
    steps = optimizer(qat.parameter_groups(model, 0.01, 0.1, quantizer_lr_factor=1.0))

    def moved() -> set[str]:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(images()).square().sum().backward()
        steps.step()
        steps.zero_grad(set_to_none=not plain)
        return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}

    with plain_formulas() if plain else torch.enable_grad():
        everything = moved()
        assert sum(name.endswith("scale") for name in everything) == 10
        assert qat.freeze_scales(model) == 10
        for _ in range(2):
            assert moved() == {name for name in everything if not name.endswith("scale")}
        assert ("CodesProductFunction" in counted) != plain
        qat.freeze_scales(model, False)
        assert moved() == everything


def test_a_frozen_model_still_passes_its_self_check(model: nn.Module) -> None:
    qat.freeze_scales(model)
    qat.freeze_batch_norm(model)
    model(images())
    assert "a step was compared with plain training and is the same" in qat.explain(model)


MISTAKES: list[tuple[Any, dict[str, bool], str]] = [
    (["head", "conv9"], {}, "'conv9' names no quantized layer .*; did you mean 'conv3' or"),
    (qat.QuantLinear, {}, "'type:QuantLinear' names no quantized layer .*; did you mean 'type:Linear'"),
    (nn.ReLU(), {}, "got ReLU"),
    ("*", {"weights": False, "activations": False}, "weights and activations are both False"),
    ("mean_quantizer", {"activations": False}, "'mean_quantizer' has no quantizer of weights"),
]


@pytest.mark.parametrize(("layers", "roles", "fact"), MISTAKES)
def test_mistakes_are_sentences(model: nn.Module, layers: Any, roles: dict[str, bool], fact: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^disable_fake_quant: .*{fact}"):
        qat.disable_fake_quant(model, layers, **roles)
    assert not off(model)
    for verb, call in (("disable_fake_quant", qat.disable_fake_quant), ("freeze_scales", qat.freeze_scales)):
        with refused(f"{verb}: the model has no quantizer; call qat.prepare first"):
            call(nn.Linear(2, 2))
