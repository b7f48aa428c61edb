"""Parametrized layers (weight norm and others), tied weights, modules that are called twice or have two names."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import qat
from qat.layers import QuantConv2d, QuantLayer, QuantLinear
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from qat.quantizer import Quantizer
from tests.references import prepared_case as checks
from tests.references.prepared_case import Plain, draw, prepared_alike, prepared_near


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def squashed_bias(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    return layer


PARAMETRIZED: dict[str, tuple[Callable[[nn.Module], nn.Module], type[nn.Module]]] = {
    "weight norm": (weight_norm, nn.Linear),
    "weight norm of a convolution": (weight_norm, nn.Conv2d),
    "spectral norm": (spectral_norm, nn.Linear),
    "the user's own": (symmetric, nn.Linear),
    "of the bias": (squashed_bias, nn.Linear),
}


@pytest.mark.parametrize("case", PARAMETRIZED)
def test_parametrised_layers_keep_their_parametrisation(case: str) -> None:
    torch.manual_seed(0)
    parametrise, kind = PARAMETRIZED[case]
    layer = nn.Conv2d(3, 4, 3) if kind is nn.Conv2d else nn.Linear(8, 8)
    x = draw(4, 3, 8, 8)
    net = Plain(lambda self, x: self.layer(x), layer=parametrise(layer)).eval()
    model = qat.prepare(net, example_inputs=x)
    twin = model.layer
    assert isinstance(twin, QuantConv2d if kind is nn.Conv2d else QuantLinear) and parametrize.is_parametrized(twin)
    modes = (False,) if case == "spectral norm" else (False, True)  # in training it iterates at every call
    checks.assert_computes_as(net, model, x, modes=modes)
    checks.assert_close_to_float(net, model, x)
    state = {name for name in model.state_dict() if "quantizer" not in name}
    assert state == set(net.state_dict())


def test_spectral_norm_iterates_in_training_as_in_float() -> None:
    torch.manual_seed(0)
    net = Plain(lambda self, x: self.layer(x), layer=spectral_norm(nn.Linear(8, 8)))
    model = qat.prepare(net, example_inputs=draw(4, 8))
    qat.calibrate(model, [draw(4, 8)])
    net.layer.load_state_dict({k: v for k, v in model.layer.state_dict().items() if "quantizer" not in k})
    for module in (net, model):
        module.train()(draw(4, 8))
    key = "layer.parametrizations.weight.0._u"
    torch.testing.assert_close(model.state_dict()[key], net.state_dict()[key])


def test_tied_weights_stay_tied() -> None:
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(10, 8), "fc": nn.Linear(8, 8), "out": nn.Linear(8, 10, bias=False)}
    net = Plain(lambda self, ids: self.out(self.fc(self.embed(ids))), **parts).eval()
    net.out.weight = net.embed.weight
    model = prepared_near(net, torch.randint(0, 10, (2, 5)))
    assert model.out.weight is model.embed.weight and model.out.weight is not net.out.weight
    # Gradients of both uses add up in the one parameter; an optimizer sees it once.
    floats = [p for name, p in model.named_parameters() if "quantizer" not in name]
    assert len(floats) == 3


def test_a_layer_called_twice_has_a_grid_for_each_input() -> None:
    model = prepared_alike(Plain(lambda self, x: self.fc(F.relu(self.fc(x))), fc=nn.Linear(8, 8)).eval(), draw(4, 8))
    grids = [node.kwargs["input_quantizer"].target for node in model.graph.nodes if node.target == "fc"]
    assert grids == ["input_quantizer", "fc_quantizer"]
    weights = [n for n, m in model.named_modules() if isinstance(m, Quantizer) and m.role == "weight"]
    assert weights == ["fc.weight_quantizer"]


@pytest.mark.parametrize("block", [False, True], ids=["layer", "block"])
def test_a_module_under_two_names_is_one_module(block: bool) -> None:
    shared: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU()) if block else nn.Linear(8, 8)
    net = Plain(lambda self, x: self.a(self.b(x)), a=shared, b=shared).eval()
    model = prepared_alike(net, draw(4, 8))
    assert sum(isinstance(module, QuantLayer) for module in model.modules()) == 1
    called = [name for name in checks.calls(model) if name.startswith(("a", "b")) and "quantizer" not in name]
    assert len(called) == 2 + 2 * block
    checks.assert_takes_float_state(model, net.state_dict())


class ConstructsOtherwise(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)


class ComputesOtherwise(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


def test_subclasses_are_quantized_as_what_they_compute() -> None:
    model = prepared_alike(nn.Sequential(ConstructsOtherwise(8, 8), ComputesOtherwise(8, 8)).eval(), draw(4, 8))
    assert isinstance(model.get_submodule("0"), QuantLinear)
    # The tracer enters the second layer: the function that reads its weight is quantized.
    assert sum(isinstance(module, QuantLayer) for module in model.modules()) == 2
    assert notes_of(model, LEFT_IN_FLOAT) == {}
    assert checks.activation_quantizers(model) == ["input_quantizer", "0_quantizer"]
