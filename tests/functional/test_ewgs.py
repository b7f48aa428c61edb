"""update_ewgs: its delta against exact Hessians, and the state that it does not change."""

import pytest
import torch
from torch import Tensor, nn

import qat
from tests.references import rule_specs as specs
from tests.references.rule_specs import HESSIAN, activation, weight
from tests.runs.rule_training import same_state, state_of

ROWS = {
    "lsq": ("weight", weight("lsq", 4, HESSIAN)),
    "lsq, tensor": ("weight", weight("lsq", 4, HESSIAN, specs.TENSOR)),
    "lsq, groups": ("weight", weight("lsq", 4, HESSIAN, specs.GROUPS)),
    "power_of_two": ("weight", weight("power_of_two", 4, HESSIAN)),
    "minmax": ("weight", weight("minmax", 4, HESSIAN)),
    "learned_bits": ("weight", weight("learned_bits", 4, HESSIAN)),
    "activation pact": ("activation", activation("pact", 4, HESSIAN)),
    "activation ema": ("activation", activation("ema", 4, HESSIAN)),
    "activation lsq_plus": ("activation", activation("lsq_plus", 4, HESSIAN)),
}


class Quantized(nn.Module):
    """A quantized tensor, with a BatchNorm beside it that counts how often it ran."""

    def __init__(self, role: str, spec: qat.QuantSpec) -> None:
        super().__init__()
        self.tensor = nn.Parameter(specs.tensor_of(role, spec))
        self.quantizer = specs.fitted(role, spec, self.tensor.detach())
        self.norm = nn.BatchNorm1d(3)

    def forward(self) -> Tensor:
        self.norm(torch.randn(4, 3))
        return self.quantizer(self.tensor)


def quadratic(model: Quantized, batch: tuple[Tensor, Tensor]) -> Tensor:
    """sum(c/2 q^2 + b q): the Hessian by q is diagonal, c, so random signs give its trace exactly."""
    q = model()
    curvature, slope = batch
    return (curvature / 2 * q.square() + slope * q).sum()


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize(("role", "spec"), ROWS.values(), ids=ROWS.keys())
def test_delta_is_the_formula_on_a_quadratic_loss(role, spec, draws):
    model = Quantized(role, spec)
    shape = model.tensor.shape
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.rand(shape, generator=generator) * scale + 0.5, torch.randn(shape, generator=generator))
        for scale in (1.0, 3.0)
    ]
    deltas = qat.update_ewgs(model, quadratic, batches, draws)
    q = model().detach().double()
    traces, deviations = [], []
    for curvature, slope in batches:
        loss = lambda q, c=curvature, b=slope: (c.flatten() / 2 * q.square() + b.flatten() * q).sum()  # noqa: E731
        traces.append(torch.autograd.functional.hessian(loss, q.flatten()).diagonal().mean())
        deviations.append((curvature * q + slope).std(correction=0))
    grouped = model.tensor.reshape(6, 2, 4, 3, 3) if spec.granularity == "group" else model.tensor
    scale = model.quantizer.grid(grouped)[0].double().mean()
    steps = 14 if role == "weight" else 15  # narrow: from -7 to 7
    expected = scale * steps * torch.stack(traces).mean() / (3 * torch.stack(deviations).mean())
    assert deltas == {"quantizer": pytest.approx(expected.item(), rel=1e-4)}
    assert model.quantizer.ewgs_delta.item() == deltas["quantizer"]
    assert "quantizer.ewgs_delta" in model.state_dict()


def test_random_signs_estimate_a_trace_that_is_not_diagonal():
    model = Quantized(*ROWS["lsq, tensor"])
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(432, 432, generator=generator) / 20
    matrix = root @ root.T + torch.eye(432)

    def loss(model: Quantized, batch: Tensor) -> Tensor:
        q = model().flatten()
        return q @ batch @ q / 2

    found = qat.update_ewgs(model, loss, [matrix], draws=50)["quantizer"]
    q = model().detach().flatten()
    scale = model.quantizer.grid()[0].item()
    expected = scale * 14 * matrix.diagonal().mean() / (3 * (matrix @ q).std(correction=0))
    assert found == pytest.approx(expected.item(), rel=0.02)


def test_nothing_but_delta_changes():
    model = Quantized(*ROWS["activation ema"])
    before = state_of(model)
    qat.update_ewgs(model, quadratic, [(torch.ones(model.tensor.shape), torch.ones(model.tensor.shape))])
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"quantizer.ewgs_delta"} and "norm.running_mean" in before and "quantizer.low" in before
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.quantizer._forward_hooks and model.training


def test_a_prepared_model_gets_a_delta_that_gradients_follow():
    model = specs.prepared(weight("lsq", 3, HESSIAN), activation("lsq", 4, HESSIAN))
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch), specs.LABELS)  # noqa: E731
    loss(model, specs.images()).backward()
    plain = model.conv1.weight.grad.clone()
    model.zero_grad()
    deltas = qat.update_ewgs(model, loss, [specs.images(1), specs.images(2)])
    quantizers = {name for name, module in model.named_modules() if isinstance(module, qat.Quantizer)}
    assert set(deltas) == quantizers and all(delta >= 0 for delta in deltas.values()) and max(deltas.values()) > 1e-3
    loss(model, specs.images()).backward()
    corrected = model.conv1.weight.grad
    assert corrected.isfinite().all() and not torch.equal(corrected, plain)
    # the same batches, the same delta
    assert qat.update_ewgs(model, loss, [specs.images(1), specs.images(2)]) == deltas


@pytest.mark.parametrize("loss", [
    lambda model, batch: -quadratic(model, batch),  # curved downwards
    lambda model, batch: model().sum(),  # not at all
    lambda model, batch: model().abs().sum(),
    lambda model, batch: quadratic(model, batch) * 0,  # without gradients
    lambda model, batch: quadratic(model, batch) * float("nan"),
])  # fmt: skip
def test_a_useless_trace_gives_zero(loss):
    model = Quantized(*ROWS["lsq"])
    model.quantizer.ewgs_delta.fill_(0.5)
    ones = torch.ones(model.tensor.shape)
    assert qat.update_ewgs(model, loss, [(ones, ones)]) == {"quantizer": 0.0}
    assert model.quantizer.ewgs_delta.item() == 0.0


def test_models_that_ask_for_no_delta_are_left_alone():
    model = specs.prepared(specs.WEIGHTS["lsq, ewgs"], specs.ACTIVATIONS["lsq"])
    assert qat.update_ewgs(model, lambda model, batch: model(batch).sum(), []) == {}


def test_no_batches_and_evaluation_mode_are_refused():
    model = Quantized(*ROWS["lsq"])
    before = state_of(model)
    with pytest.raises(ValueError, match="batches is empty"):
        qat.update_ewgs(model, quadratic, iter(()))
    assert same_state(state_of(model), before)
    model = specs.prepared(weight("lsq", 4, HESSIAN), activation("lsq", 4)).eval()
    with pytest.raises(ValueError, match=r"train\(\)"):
        qat.update_ewgs(model, lambda model, batch: model(batch).square().mean(), [specs.images()])


def test_a_failing_batch_leaves_no_traces():
    model = Quantized(*ROWS["activation ema"])
    before = state_of(model)

    def loss(model: Quantized, batch: Tensor) -> Tensor:
        model()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        qat.update_ewgs(model, loss, [torch.ones(1)])
    assert not model.quantizer._forward_hooks
    assert same_state(state_of(model), before), "buffers are put back"
