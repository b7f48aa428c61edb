"""Every registered rule in layers and prepared models: trained, saved, compiled, exported, and on two ranks."""

import copy
import dataclasses
import pickle
import traceback
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

import qat
from qat.export import compare_layers
from qat.layers import QuantLinear
from qat.spec import QuantSpec
from tests.references import rule_specs as specs
from tests.references.rule_specs import every_layer, every_model, fitted, tensor_of
from tests.runs.rule_training import Layers, answer_loss, images_for, quantizers_of, state_of, train
from tests.runs.tiny_training import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:calibrate. the rule")  # test_rule_options.py


@every_layer
def test_evaluation_on_integers_is_float_but_for_the_bias(weight_spec, activation_spec):
    torch.manual_seed(0)
    layer = QuantLinear(8, 6, weight_spec=weight_spec, activation_spec=activation_spec)
    x = torch.randn(40, 8)
    x = x.abs() if activation_spec.symmetric and not activation_spec.signed else x
    qat.calibrate(layer, [x])
    layer.eval()
    plain = F.linear(layer.input_quantizer(x), layer.weight_quantizer(layer.weight), layer.bias)
    gap = (layer(x) - plain).abs()
    if layer._runs_on_integers(layer.input_quantizer):
        unit = layer.integers(layer.input_quantizer).accumulator_scale
        assert (gap <= unit / 2 + 1e-5 * plain.abs().max()).all()
    else:
        assert gap.max() == 0


@every_model
def test_models_train_evaluate_and_load(weight_spec, activation_spec):
    model = specs.prepared(weight_spec, activation_spec)
    train(model, [specs.images(seed) for seed in range(3)], answer_loss)
    model.eval()
    x = specs.images(9)
    y = model(x)
    assert y.isfinite().all()
    if activation_spec.bits > 1 or activation_spec.rule == "binary":
        assert (y.std(0) > 0).any(), "it tells images apart"
    other = specs.uncalibrated(weight_spec, activation_spec)
    other.load_state_dict(model.state_dict())
    for same in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(same.eval()(x), y)
    assert weight_spec.rule in str(qat.summary(model)) and activation_spec.rule in str(qat.summary(model))


COMPILED = [
    "weight lsq, ewgs groups", "weight lsq_plus", "weight minmax", "weight ema, groups", "weight power_of_two",
    "weight dorefa", "weight dorefa, 1 bit", "weight apot", "weight binary", "weight binary, error decay",
    "weight ternary", "weight ttq", "weight n2uq", "weight dsq", "weight stacked_sigmoid", "weight fp8_e4m3",
    "weight mxfp8", "weight learned_bits", "activation lsq, from zero", "activation lsq_plus",
    "activation minmax, ewgs", "activation ema", "activation pact", "activation pact, from zero", "activation dorefa",
    "activation binary, approximate", "activation mxint8",
    "activation learned_bits, from zero",
]  # fmt: skip


class Counting:
    """torch's aot_eager backend; counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        torch._dynamo.reset()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)


def assert_compiled_equals_eager(eager: nn.Module, inputs: list[Tensor]) -> None:
    """Outputs, gradients and state of three training steps, an evaluation after each; one graph for each mode."""
    module, backend = copy.deepcopy(eager), Counting()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for step, x in enumerate(inputs):
        found = []
        for owner, call in ((eager, eager), (module, compiled)):
            owner.train()
            qat.set_progress(owner, step / len(inputs))
            owner.zero_grad()
            given = x.clone().requires_grad_()
            y = call(given)
            y.square().sum().backward()
            found.append([y, given.grad, *(p.grad for p in owner.parameters()), *state_of(owner).values()])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(compiled.eval()(x), eager.eval()(x), rtol=1e-6, atol=1e-7)
    assert backend.graphs == 2, "one graph for training and one for evaluation"


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_training_equals_eager_training(name):
    role, spec = specs.QUANTIZERS[name]
    inputs = [tensor_of(role, spec, seed) * (1 + seed) for seed in range(3)]
    assert_compiled_equals_eager(fitted(role, spec), inputs)


# Weights of conv1, conv2 and fc; the input of conv1, the input of fc, and all other activations.
DEPLOYED = [
    ("lsq", "minmax, ewgs", "ema", "lsq_plus", "learned_bits", "minmax"),
    ("power_of_two", "dorefa", "dorefa, not rescaled", "power_of_two", "dorefa", "ema"),
    ("dorefa, 1 bit", "binary", "ternary", "lsq, 1 bit", "lsq, signed", "pact"),
    ("n2uq", "dsq", "stacked_sigmoid", "dsq", "stacked_sigmoid", "lsq, ewgs"),
    ("learned_bits", "lsq, 2 bits", "lsq, relative", "pact", "lsq", "learned_bits"),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("names", DEPLOYED, ids=", ".join)
def test_the_exported_model_has_the_same_integers(tmp_path, names):
    weights, activations = [specs.WEIGHTS[n] for n in names[:3]], [specs.ACTIVATIONS[n] for n in names[3:]]
    inputs = {"conv1": activations[0], "conv2": activations[2], "fc": activations[1]}
    overrides = {
        name: {"weight": dataclasses.asdict(spec), "activation": dataclasses.asdict(inputs[name])}
        for name, spec in zip(inputs, weights, strict=True)
    }
    model = specs.prepared(weights[0], activations[2], overrides)
    assert {quantizer.spec for quantizer in quantizers_of(model).values()} == {*weights, *activations}
    train(model, [specs.images(seed) for seed in range(2)], answer_loss)
    path = tmp_path / "model.onnx"
    qat.export_onnx(model, path, specs.images())
    batches = [specs.images(seed) for seed in range(7, 10)]
    for optimize in (False, True):
        differences = compare_layers(path, model, torch.cat(batches), optimize)
        assert [layer.name for layer in differences if layer.differing] == []
        assert sum(layer.elements for layer in differences) == 48 * (100 + 3 * 200 + 8)
    answer = qat.verify_onnx(path, model, batches)
    assert answer.samples == 48 and answer.agreement == 1.0 and answer.max_difference < 1e-4
    assert (model.eval()(specs.images(7)).std(0) > 0).any()


REFUSED = [
    (specs.QUANTIZERS["weight lsq, groups"], "has a scale per group of 4 inputs"),
    (specs.QUANTIZERS["activation binary"], "uses the rule 'binary', whose values lie on no integer grid"),
    (("weight", specs.weight("dorefa", 8)), "-255 to 255"),
    (specs.QUANTIZERS["weight lsq, 16 bits"], "-32767 to 32767"),
    (specs.QUANTIZERS["activation pact, 16 bits"], "0 to 65535"),
]


@pytest.mark.parametrize(("row", "fact"), REFUSED, ids=[fact for _, fact in REFUSED])
def test_the_exporter_refuses_what_a_runtime_has_no_integers_for(tmp_path, row, fact):
    """Which rules these are is the quantizers' `refusal`, see test_rules.py."""
    role, spec = row
    given = {"weight_spec": specs.WEIGHTS["lsq"], "activation_spec": specs.ACTIVATIONS["lsq"], f"{role}_spec": spec}
    with pytest.raises(ValueError) as refused:
        qat.export_onnx(specs.prepared(**given), tmp_path / "model.onnx", specs.images())
    assert not list(tmp_path.iterdir())
    name = "conv1.weight_quantizer" if role == "weight" else "input_quantizer"
    assert str(refused.value).startswith(f"export_onnx: {name!r} ") and fact in str(refused.value)


STEPS = 2


def inputs(activation_spec: QuantSpec, rank: int, step: int) -> Tensor:
    """A different batch for each rank, with larger values for higher ranks."""
    return images_for(activation_spec, 10 * rank + step) * (1 + rank)


def trained_on(weight_spec: QuantSpec, activation_spec: QuantSpec, rank: int) -> dict[str, Tensor]:
    """Calibrate and train for two steps; return the state and the gradients of the last step."""
    model = Layers(weight_spec, activation_spec)
    qat.calibrate(model, [inputs(activation_spec, rank, 9)])
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    for step in range(STEPS):
        qat.set_progress(parallel, step / STEPS)
        loss = nn.functional.cross_entropy(parallel(inputs(activation_spec, rank, step)), specs.LABELS)
        optimizer.zero_grad()
        (loss + qat.penalty(parallel)).backward()
        optimizer.step()
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**{name: value.clone() for name, value in model.state_dict().items()}, **gradients}


def work(rank: int) -> dict[str, Any]:
    """One of two processes, which trains all rules in turn; a failure is saved as its traceback."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "calibrate: the rule")  # that loses much of a weight
    found: dict[str, Any] = {}
    for name, (weight_spec, activation_spec) in specs.LAYERS.items():
        try:
            found[name] = trained_on(weight_spec, activation_spec, rank)
        except Exception:
            found[name] = traceback.format_exc()
    quantizer = specs.new("activation", specs.ACTIVATIONS["learned_bits"])
    qat.calibrate(quantizer, [specs.images()] if rank else [])
    found["one-sided calibration"] = quantizer.state_dict()
    model = Layers(specs.weight("lsq", 4, specs.HESSIAN), specs.activation("lsq", 4, specs.HESSIAN))
    qat.calibrate(model, [inputs(specs.ACTIVATIONS["lsq"], rank, 9)])
    found["update_ewgs"] = qat.update_ewgs(
        model, lambda model, x: nn.functional.cross_entropy(model(x), specs.LABELS), [specs.images(rank)]
    )
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(work, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", specs.LAYERS)
def test_two_ranks_stay_equal(ranks, name):
    first, second = (found[name] for found in ranks)
    assert not isinstance(first, str), first
    assert not isinstance(second, str), second
    assert first.keys() == second.keys()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert all(value.isfinite().all() for value in first.values())
    model = Layers(*specs.LAYERS[name])
    assert first.keys() >= {f"gradient of {key}" for key, _ in model.named_parameters()}, "every parameter is used"
    assert set(model.state_dict()) == {key for key in first if not key.startswith("gradient of ")}


@pytest.mark.parametrize("name", [name for name, (_, spec) in specs.LAYERS.items() if spec.rule in ("minmax", "ema")])
def test_observed_ranges_are_those_of_all_ranks(ranks, name):
    _, spec = specs.LAYERS[name]
    given = [[inputs(spec, rank, step) for rank in (0, 1)] for step in (9, *range(STEPS))]
    quantizer = specs.new("activation", spec)
    qat.calibrate(quantizer, given[0])
    low, high = quantizer.low.clone(), quantizer.high.clone()
    for batches in given[1:]:
        batch = torch.cat(batches)
        bottom, top = batch.amin().clamp(max=0), batch.amax().clamp(min=0)
        if spec.rule == "ema":
            momentum = spec.options.get("momentum", 0.01)
            low, high = low + momentum * (bottom - low), high + momentum * (top - high)
        else:
            low, high = torch.minimum(low, bottom), torch.maximum(high, top)
    torch.testing.assert_close(ranks[1][name]["conv.input_quantizer.low"], low)
    torch.testing.assert_close(ranks[1][name]["conv.input_quantizer.high"], high)


def test_a_rank_without_batches_calibrates_as_the_other(ranks):
    first, second = (found["one-sided calibration"] for found in ranks)
    assert first["elements"].item() == second["elements"].item() == 100, "learned bits are paid for on both"
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_update_ewgs_finds_one_delta_for_all_ranks(ranks):
    first, second = (found["update_ewgs"] for found in ranks)
    assert first == second and set(first) == {
        f"{layer}.{kind}_quantizer" for layer in ("conv", "fc") for kind in ("weight", "input")
    }
    assert max(first.values()) > 0
