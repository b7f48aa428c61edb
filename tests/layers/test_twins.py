"""What all twins have in common: shared parameters, the way back, copies, state, dtypes, and that they learn."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

import qat
from qat.layers import QuantLayer
from qat.quantizer import Quantizer
from qat.spec import QuantSpec
from tests.layers.twin_case import CASES, Case, activations, assert_learns, fine_twin

# torch's own
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
QUANTIZER_KEYS = {f"weight_quantizer.{name}" for name in ("scale", "smallest_scale", "calibrated")}
WEIGHT_ALONE: dict[str, Any] = {"activation_spec": None}
every_twin = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
FIRST = {case.float_type.__name__: case for case in reversed(CASES.values())}
"""One of each class."""

every_class = pytest.mark.parametrize("case", FIRST.values(), ids=FIRST)
one_weight = pytest.mark.parametrize(
    "case", [each for each in FIRST.values() if issubclass(each.twin_type, QuantLayer)]
)


def calibrated(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    if activations(layer):
        qat.calibrate(layer, [(inputs,)])
    return layer


def result(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The output, without an attention's weights or a final state."""
    y = layer(*inputs)
    return y if isinstance(y, Tensor) else y[0]


def converted(inputs: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


@every_twin
def test_from_float_and_back(case: Case) -> None:
    torch.manual_seed(0)
    plain = case.float_type(**case.arguments, dtype=torch.float64).eval()
    inputs = converted(case.inputs(), torch.float64)
    random = torch.get_rng_state()
    layer = case.twin_type.from_float(plain, **WEIGHT_ALONE if issubclass(case.twin_type, QuantLayer) else {})
    back = layer.to_float()
    assert torch.equal(torch.get_rng_state(), random), "from_float or to_float draws random numbers"
    assert type(back) is case.float_type and not back.training and not layer.training
    for twin in (layer, back):
        assert all(twin.get_parameter(name) is parameter for name, parameter in plain.named_parameters())
    assert back.extra_repr() == plain.extra_repr() == layer.extra_repr()
    parts = {name: part for name, part in layer.named_modules() if isinstance(part, Quantizer)}
    added = {f"{name}.{key}" for name, part in parts.items() for key in part.state_dict()}
    assert list(back.state_dict()) == list(plain.state_dict())
    assert set(layer.state_dict()) == set(plain.state_dict()) | added
    if isinstance(layer, QuantLayer):
        assert added == QUANTIZER_KEYS
    assert torch.equal(result(back, inputs), result(plain, inputs))
    torch.testing.assert_close(result(calibrated(layer, inputs), inputs), result(plain, inputs), rtol=0.05, atol=0.05)


@every_class
def test_from_float_quantizes_what_the_constructor_quantizes(case: Case) -> None:
    every_spec: tuple[dict[str, Any], ...] = ({}, {"weight_spec": QuantSpec(bits=4)})
    for specs in every_spec:
        made = case.twin_type(**case.arguments, **specs)
        twin = case.twin_type.from_float(case.float_type(**case.arguments), **specs)
        one, other = (
            {name: part.spec for name, part in layer.named_modules() if isinstance(part, Quantizer)}
            for layer in (made, twin)
        )
        assert one == other and twin.state_dict().keys() == made.state_dict().keys()
        assert result(calibrated(twin, case.inputs()), case.inputs()).isfinite().all()


def test_an_argument_of_a_twin_of_ones_own_may_be_a_grid() -> None:
    class Twice(qat.QuantLinear):
        def __init__(self, size: int, grid: QuantSpec, bits: int = 8) -> None:
            super().__init__(size, size, weight_spec=grid)

    assert Twice(4, QuantSpec(bits=3), bits=4).weight_quantizer.spec.bits == 3


@every_twin
def test_it_draws_the_weights_that_torch_draws(case: Case) -> None:
    torch.manual_seed(3)
    plain = case.float_type(**case.arguments, dtype=torch.float64)
    torch.manual_seed(3)
    state = case.twin_type(**case.arguments, dtype=torch.float64).state_dict()
    own = [name for name in state if "quantizer" not in name]
    assert own == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@every_twin
def test_everything_learns_and_evaluation_is_near_training(case: Case) -> None:
    torch.manual_seed(2)
    inputs = case.inputs()
    layer = calibrated(case.twin_type(**case.arguments), inputs)
    for mode in (True, False):
        layer.train(mode).zero_grad()
        result(layer, inputs).square().sum().backward()
        assert_learns(layer)
    trained = result(layer.train(), inputs)
    torch.testing.assert_close(result(layer.eval(), inputs), trained, rtol=1e-3, atol=1e-2)


@every_twin
def test_copies_files_and_a_loaded_state_compute_the_same(case: Case) -> None:
    torch.manual_seed(0)
    inputs = case.inputs()
    layer = calibrated(case.twin_type(**case.arguments), inputs).eval()
    expected = result(layer, inputs)
    fresh = case.twin_type(**case.arguments).eval()
    fresh.load_state_dict(layer.state_dict(), strict=True)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert torch.equal(result(again, inputs), expected)
        again.get_parameter(case.weight).data.zero_()
        assert not torch.equal(result(again, inputs), expected), "its own weights count"
    assert torch.equal(result(layer, inputs), expected)


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
@every_class
def test_a_parametrised_weight_stays_parametrised(case: Case, wrap: Any) -> None:
    torch.manual_seed(0)
    inputs = case.inputs()
    plain = wrap(case.float_type(**case.arguments), case.weight).eval()
    layer = calibrated(case.twin_type.from_float(plain), inputs)
    torch.testing.assert_close(result(layer, inputs), result(plain, inputs), rtol=0.05, atol=0.05)
    assert {name for name in layer.state_dict() if "quantizer" not in name} == set(plain.state_dict())
    for shown in (layer, copy.deepcopy(layer)):
        shown.zero_grad()
        result(shown, inputs).square().sum().backward()
        assert_learns(shown)
    back = layer.to_float()
    assert all(back.get_parameter(name) is parameter for name, parameter in plain.named_parameters())
    assert torch.equal(result(back, inputs), result(plain, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@every_class
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    """Converted, with the quantizers' parameters, and constructed, with these in float32."""
    torch.manual_seed(0)
    inputs = case.inputs()
    layer = calibrated(case.twin_type(**case.arguments), inputs)
    expected = result(layer.eval(), inputs)
    made = case.twin_type(**case.arguments, dtype=dtype)
    made.load_state_dict(layer.state_dict())
    given = converted(inputs, dtype)
    tolerance = 1e-3 if dtype == torch.float64 else 0.05
    for other in (copy.deepcopy(layer).to(dtype), made):
        for mode in (True, False):
            other.train(mode).zero_grad()
            y = result(other, given)
            assert y.dtype == dtype
            torch.testing.assert_close(y.float(), expected, rtol=tolerance, atol=tolerance)
            y.sum().backward()
            grad = other.get_parameter(case.weight).grad
            assert grad.dtype == dtype and bool(grad.to_dense().isfinite().all())


@every_class
def test_meta_device(case: Case) -> None:
    layer = case.twin_type(**case.arguments, device="meta")
    assert all(tensor.is_meta for tensor in layer.state_dict().values())


@every_class
def test_from_float_refuses_another_type(case: Case) -> None:
    name = case.float_type.__name__
    with pytest.raises(TypeError, match=rf"^Quant{name}\.from_float: expected {name}, got Identity$"):
        case.twin_type.from_float(nn.Identity())


@one_weight
def test_integers_ignore_autocast(case: Case) -> None:
    torch.manual_seed(0)
    inputs = case.inputs()
    layer = calibrated(case.twin_type(**case.arguments), inputs).eval()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = result(layer, inputs)
    assert torch.equal(mixed, result(layer, inputs))


@one_weight
def test_an_input_has_a_grid_but_indices(case: Case) -> None:
    assert case.twin_type.has_input_grid == case.inputs()[0].is_floating_point()


@every_class
def test_a_grid_in_an_argument_of_torchs_is_refused(case: Case) -> None:
    spec = QuantSpec(bits=4)
    for args, options in (((), {**case.arguments, "bias": spec}), ((*case.arguments.values(), spec), {})):
        with pytest.raises(TypeError, match=r"QuantSpec\(bits=4\) without its name; write weight_spec="):
            case.twin_type(*args, **options)
    with pytest.raises(TypeError, match="bits"):
        case.twin_type(**case.arguments, bits=4)
    with pytest.raises(TypeError, match="weight_spec must be a QuantSpec or None, got 4"):
        case.twin_type(**case.arguments, weight_spec=4)


COMPOSITES = [case for case in CASES.values() if not issubclass(case.twin_type, QuantLayer)]


composites = pytest.mark.parametrize(
    "case", COMPOSITES, ids=[f"{c.float_type.__name__} {c.arguments}" for c in COMPOSITES]
)


@composites
def test_fine_grids_give_the_gradients_that_torch_gives(case: Case) -> None:
    torch.manual_seed(0)
    layer, inputs = case.float_type(**case.arguments), case.inputs()
    gradients = []
    for module in (layer, fine_twin(layer)):
        layer.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        sum(part.square().sum() for part in pytree.tree_leaves(module(*leaves))).backward()
        gradients.append([x.grad for x in (*leaves, *layer.parameters())])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01 * float(theirs.abs().max()))


@composites
def test_without_an_activation_spec_weights_alone_are_quantized(case: Case) -> None:
    torch.manual_seed(0)
    twin, inputs = case.twin_type(**case.arguments, activation_spec=None), case.inputs()
    assert not activations(twin)
    found = [result(twin.train(mode), inputs) for mode in (True, False)]
    with torch.no_grad():
        for name, (weight, _) in twin.inner_weights().items():
            weight.copy_(twin.get_submodule(name).weight_quantizer(weight))
        if isinstance(twin, nn.MultiheadAttention):
            twin.out_proj.weight.copy_(twin.out_proj.weight_quantizer(twin.out_proj.weight))
    for y in found:
        torch.testing.assert_close(y, result(twin.to_float(), inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.LSTM, nn.GRU])
def test_dropout_is_torchs(kind: Any) -> None:
    case = FIRST[kind.__name__]
    arguments = {**case.arguments, "dropout": 0.5, **({} if kind is nn.MultiheadAttention else {"num_layers": 3})}
    layer, inputs = kind(**arguments), case.inputs()
    twin, drawn = fine_twin(layer), []
    for module in (twin, layer):
        torch.manual_seed(7)
        drawn.append(result(module, inputs))
    torch.testing.assert_close(*drawn, rtol=0, atol=2e-3)
    assert not torch.allclose(result(twin, inputs), drawn[0], atol=1e-2), "another draw, another result"
    torch.testing.assert_close(result(twin.eval(), inputs), result(layer.eval(), inputs), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("kind", "training"), [
    (nn.MultiheadAttention, True), (nn.MultiheadAttention, False), (nn.LSTM, True), (nn.GRU, False),
    (nn.Embedding, True), (nn.Embedding, False),
])  # fmt: skip
def test_compile_takes_the_whole_graph(kind: Any, training: bool) -> None:
    """Dynamo skips every subclass of torch's recurrent layers unless it is told not to."""
    case = FIRST[kind.__name__]
    twin = calibrated(case.twin_type(**case.arguments), case.inputs()).train(training)
    inputs, config = case.inputs(), torch._dynamo.config
    with config.patch(allow_rnn=True):  # type: ignore[attr-defined]
        compiled = torch.compile(twin, fullgraph=True, backend="eager")
        torch.testing.assert_close(result(compiled, inputs), result(twin, inputs))
    torch.compiler.reset()
