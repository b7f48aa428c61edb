"""The state of a prepared model: the float model's keys, copies, pickles, dtypes, memory formats, hooks."""

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.layers import QuantLayer
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from qat.quantizer import Quantizer
from tests.references.prepared_case import Net, Plain, assert_takes_float_state, draw, prepared_alike, refused


def by_mode() -> nn.Module:
    """An auxiliary head, a layer that is never called, persistent and non-persistent buffers."""

    def forward(self: Any, x: Tensor) -> Any:
        y = F.dropout(F.relu(self.norm(self.conv(x))).mean((2, 3)), 0.1, self.training)
        return (self.fc(y) + self.shift, self.aux(y)) if self.training else self.fc(y) * self.factor

    return Plain(forward, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), fc=nn.Linear(4, 2), aux=nn.Linear(4, 2),
                 unused=nn.Linear(3, 3), shift=nn.Buffer(torch.ones(2)),
                 factor=nn.Buffer(torch.full((2,), 2.0), persistent=False))  # fmt: skip


def tied() -> nn.Module:
    """Words in, words out, with one table; weights read in slices; constants made in forward."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.embed(x)
        y = F.linear(y, self.weight[:8]) + F.linear(y, self.weight[8:])
        return self.out(y.relu() * torch.arange(1.0, 9.0))

    out = nn.Linear(8, 10, bias=False)
    net = Plain(forward, weight=nn.Parameter(torch.zeros(16, 8)), embed=nn.Embedding(10, 8), out=out)
    net.out.weight = net.embed.weight
    return net


def in_parts(self: Any, x: Tensor) -> Tensor:
    y = self.norm(self.body(x))
    return self.last(y) if y.sum() > -1e9 else y


def pad(self: Any, x: Tensor) -> Tensor:
    """It branches on a size, so its graph has a guard."""
    return self.conv(F.pad(x, (0, -x.size(-1) % 3)) if x.size(-1) % 3 else x).mean((2, 3))


BODY = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "residual": (Net, draw(2, 3, 8, 8)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), draw(2, 5, 8)),
    "by mode": (by_mode, draw(2, 3, 8, 8)),
    "in parts": (lambda: Plain(in_parts, body=BODY, norm=nn.BatchNorm1d(8), last=nn.Linear(8, 8)), draw(4, 8)),
    "tied": (tied, torch.arange(10).view(2, 5)),
    "guarded": (lambda: Plain(pad, conv=nn.Conv2d(3, 4, 3)), draw(2, 3, 8, 8)),
}


def ready(case: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """The float model and its calibrated copy, in evaluation, and an input."""
    torch.manual_seed(0)
    make, x = NETS[case]
    net = make().eval()
    model = qat.prepare(net, example_inputs=x)
    qat.calibrate(model, [x])
    return net, model, x


@pytest.mark.parametrize("example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("case", NETS)
def test_a_float_checkpoint_fits_without_a_key_too_many(case: str, example: bool) -> None:
    make, x = NETS[case]
    net = make()
    if case == "guarded" and not example:
        net = nn.Sequential(net)  # it cannot be traced then; its layers keep their names
    model = qat.prepare(net, example_inputs=x if example else None)
    state = {name: value + 1 for name, value in net.state_dict().items()}
    assert_takes_float_state(model, state)
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    net.load_state_dict(qat.float_state_dict(model))  # and back, strictly
    assert {name for name, _ in net.named_parameters(remove_duplicate=False)} <= {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize("case", NETS)
def test_copies_pickles_and_strict_loading_change_nothing(case: str) -> None:
    net, model, x = ready(case)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    fresh = qat.prepare(net, example_inputs=x).eval()
    fresh.load_state_dict(model.state_dict())
    gradients = trained_gradients(model, x)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False), fresh):
        assert torch.equal(twin(x), expected)
        assert list(twin.state_dict()) == list(model.state_dict())
        assert notes_of(twin, LEFT_IN_FLOAT) == notes_of(model, LEFT_IN_FLOAT)
        for name, found in trained_gradients(twin, x).items():
            torch.testing.assert_close(found, gradients[name], msg=name)


def test_what_cannot_be_copied_is_shared_by_copies() -> None:
    _, model, x = ready(next(iter(NETS)))
    expected, lock = model(x), threading.Lock()
    model.log, model.sizes = lock, [1]
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    twin = copy.deepcopy(model)
    assert twin.log is lock and twin.sizes == [1] and twin.sizes is not model.sizes
    assert torch.equal(twin(x), expected)
    assert torch.equal(qat.convert(model)(x), expected)


def trained_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    twin = copy.deepcopy(model).train()
    torch.manual_seed(0)
    result = twin(x)
    sum(part.square().sum() for part in (result if isinstance(result, tuple) else (result,))).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", NETS)
def test_a_model_moves_to_another_dtype(case: str) -> None:
    _, model, x = ready(case)
    expected = model(x).detach()
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        moved, given = copy.deepcopy(model).to(dtype), x.to(dtype) if x.is_floating_point() else x
        found = moved(given)
        assert found.dtype is dtype
        # Wider floats change only ties; half precision costs its missing digits.
        error = float((found.detach().double() - expected.double()).square().mean().sqrt())
        assert error < (0.01 if dtype is torch.float64 else 0.05) * float(expected.square().mean().sqrt())
        gradients = trained_gradients(moved, given)
        assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients.values())


@pytest.mark.parametrize("case", ["residual", "in parts"])
def test_prepare_twice_is_refused(case: str) -> None:
    _, model, x = ready(case)
    takes = "prepare takes the float model, or one with quantized layers of your own"
    with refused(f"prepare: the model is prepared already; {takes}"):
        qat.prepare(model, example_inputs=x)


@pytest.mark.parametrize("watched", ["result", "input"])
@pytest.mark.parametrize("name", ["first", "body", "body.1", ""])
def test_hooks_act_in_the_prepared_model_too(name: str, watched: str) -> None:
    parts = {"first": nn.Linear(8, 8), "body": nn.Sequential(nn.Linear(8, 8), nn.ReLU())}
    net = Plain(lambda self, x: self.body(self.first(x)), **parts).eval()
    module = net.get_submodule(name)
    if watched == "result":
        module.register_forward_hook(lambda module, inputs, output: 3 * output)
    else:
        module.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0],))
    model = prepared_alike(net, draw(4, 8))
    left = {"first": "it carries forward hooks, which the twin would lose"} if name == "first" else {}
    assert notes_of(model, LEFT_IN_FLOAT) == left or not name  # hooked itself, a model is prepared in parts
    assert any(isinstance(module, QuantLayer) for module in model.modules())


def test_every_module_keeps_its_mode() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 3)).train()
    net[1].eval()  # a frozen BatchNorm
    model = qat.prepare(net, example_inputs=draw(2, 3, 8, 8))
    assert [model.get_submodule(str(number)).training for number in range(4)] == [True, False, True, True]
    assert model.training


@pytest.mark.filterwarnings("ignore:a quantizer .* runs on its default range")
@pytest.mark.parametrize("case", ["residual", "attention", "by mode", "guarded"])
def test_everything_lives_where_the_model_does(case: str) -> None:
    make, x = NETS[case]
    model = qat.prepare(make().eval().to("meta"), example_inputs=x)  # moved to the model's device
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert model(x.to("meta")).device.type == "meta"


def out_of_order(self: Any, x: Tensor) -> Tensor:
    return self.heads[0](self.heads[1](self.acts["act"](self.body(x)).mean((2, 3))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_blocks_are_indexed_and_iterated_but_not_called(copied: Callable[..., Any]) -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 3)))
    heads, acts = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 4)]), nn.ModuleDict({"act": nn.ReLU()})
    x = draw(2, 3, 8, 8)
    model = qat.prepare(Plain(out_of_order, body=body, heads=heads, acts=acts), example_inputs=x)
    for each in (model, copied(model)):
        assert [type(child).__name__ for child in each.body][:3] == ["QuantConv2d", "BatchNorm2d", "ReLU"]
        assert each.body[3][0] is each.get_submodule("body.3.0") and each.heads[1] is each.get_submodule("heads.1")
        assert each.acts["act"] is each.get_submodule("acts.act") and each.body
        assert (len(each.body), each.heads[-1]) == (4, each.heads[1])
        with pytest.raises(IndexError, match=r"has no child 4; it has .*3"):
            each.body[4]
        with pytest.raises(NotImplementedError):  # its layers would compute without the grids of their inputs
            each.body(x)
    assert type(qat.prepare(nn.Sequential(nn.Linear(4, 4)), example_inputs=draw(2, 4))[0]) is qat.QuantLinear


def four_or_eight(bits: int) -> nn.Module:
    return qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).eval(),
                       qat.QuantRecipe(weight={"bits": bits}, activation={"bits": bits}),
                       draw(4, 3, 8, 8))  # fmt: skip


def test_a_state_of_other_bits_brings_weights_and_no_ranges(tmp_path: Path) -> None:
    """Scales of 8 bits hold a sixteenth of a range at 4: they count as not calibrated, and calibration mends it."""
    eight, four, fresh, x = four_or_eight(8), four_or_eight(4), four_or_eight(4), draw(4, 3, 8, 8)
    qat.calibrate(eight, x)
    torch.save(eight.state_dict(), tmp_path / "eight.pt")
    four.load_state_dict(torch.load(tmp_path / "eight.pt", weights_only=True))
    assert not any(module.is_calibrated for module in four.modules() if isinstance(module, Quantizer))
    assert str(qat.summary(four)).count("not calibrated") == 4
    with pytest.warns(UserWarning, match="or on one of other bits; call qat.calibrate"):
        four(x)
    qat.calibrate(four, x)
    fresh.load_state_dict(qat.float_state_dict(eight), strict=False)
    qat.calibrate(fresh, x)
    assert torch.equal(four(x), fresh(x))
    again = four_or_eight(8)
    again.load_state_dict(torch.load(tmp_path / "eight.pt", weights_only=True))
    assert torch.equal(again(x), eight(x))
