"""Capture with example inputs: decisions on sizes, constants made in forward, containers, wrapped functions."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.preparation.parts import prepared_parts
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from tests.references import prepared_case as checks
from tests.references.prepared_case import Plain, assert_computes_as, draw, prepared_alike, refused, without_quantizers


def linear(inputs: int = 8) -> nn.Linear:
    return nn.Linear(inputs, 8)


def pad_to_four(self: Any, x: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    below, right = -height % 4, -width % 4
    if below or right:
        x = F.pad(x, (0, right, 0, below))
    return self.conv(x)[..., :height, :width]


def step_by_step(self: Any, x: Tensor) -> Tensor:
    steps = [self.a(x[:, number]) for number in range(x.size(1))]
    return torch.stack(steps, 1).sum(1)


def residual_if_it_fits(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return y + x if y.shape == x.shape else y


def filled(self: Any, x: Tensor) -> Tensor:
    room = x.new_zeros(x.shape)
    room[:, :4] = 10 * self.a(x)[:, :4]
    room[:, 4:] += 1
    return self.b(room)


def shifted_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y.add_(10)
    return self.b(y)


def shifted_through_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y.view(-1, 2, 4).add_(10)
    return self.b(y)


def shifted_behind_a_reader(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    turned = y.transpose(0, 1)
    early = self.b(turned).transpose(0, 1)
    turned.add_(10)  # into y, though the layer before it has read a grid
    return early + self.b(y)


def cleared_on_a_copy(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    kept, cleared = y.clone(), y.clone()
    cleared[:, 0], y[:, ::2] = 0, 1  # and what they were copied from
    return self.b(y) + self.b(cleared) + self.b(kept)


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, nn.Module], Tensor]] = {
    "padding": (pad_to_four, {"conv": nn.Conv2d(3, 4, 3, padding=1)}, draw(2, 3, 7, 9)),
    "range": (step_by_step, {"a": linear()}, draw(2, 3, 8)),
    "shapes": (residual_if_it_fits, {"a": linear()}, draw(3, 8)),
    "iteration": (lambda self, x: sum(self.a(row) for row in x), {"a": linear()}, draw(3, 2, 8)),
    "int": (lambda self, x: self.a(x) / int(x.size(-1) ** 0.5), {"a": linear()}, draw(3, 8)),
    "zeros": (lambda self, x: self.a(torch.cat([x, torch.zeros(x.size(0), 2, dtype=x.dtype)], 1)), {"a": linear(10)},
              draw(3, 8)),
    "arange": (lambda self, x: self.a(x + self.e(torch.arange(x.size(1), device=x.device))),
               {"a": linear(), "e": nn.Embedding(9, 8)}, draw(2, 5, 8)),
    "isinstance": (lambda self, x: self.a(x if isinstance(x, Tensor) else x[0]), {"a": linear()}, draw(3, 8)),
    "item assignment": (filled, {"a": linear(), "b": linear()}, draw(16, 8)),
    "item assignment on a copy": (cleared_on_a_copy, {"a": linear(), "b": linear()}, draw(16, 8)),
    "in place": (shifted_in_place, {"a": linear(), "b": linear()}, draw(16, 8)),
    "in place through a view": (shifted_through_a_view, {"a": linear(), "b": linear()}, draw(16, 8)),
    "in place through a view that is read": (shifted_behind_a_reader, {"a": linear(), "b": linear()}, draw(3, 5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_forward_decides_on_sizes_is_computed_as_the_float_model_does(case: str) -> None:
    forward, parts, x = CASES[case]
    checks.prepared_whole(Plain(forward, **parts).eval(), x)


def test_another_size_that_decides_is_refused_and_one_that_does_not_is_fine() -> None:
    net = Plain(pad_to_four, conv=nn.Conv2d(3, 4, 3, padding=1)).eval()
    model = without_quantizers(qat.prepare(net, example_inputs=draw(2, 3, 7, 9)))
    for shape in ((5, 3, 7, 9), (1, 3, 11, 13)):  # another batch; other sizes with the same padding
        x = draw(*shape)
        torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-5)
    with refused(
        "the model was prepared for inputs with (((-1)*x.shape[2]) % 4) != 0, as its example_inputs have, and x has the"
        " shape (2, 3, 8, 9); prepare the model again with inputs of this size"
    ):
        model(draw(2, 3, 8, 9))


def test_a_rank_that_decides_is_checked() -> None:
    """No guard of an export tells of it, and the graph would run with another one."""
    net = Plain(lambda self, x: self.a(x) if x.dim() == 2 else -self.a(x), a=linear()).eval()
    model = qat.prepare(net, example_inputs=draw(8, 8))
    with pytest.raises(ValueError, match=r"prepared for inputs with len\(x.shape\) == 2, .* \(8, 8, 8\)"):
        model(draw(8, 8, 8))


def optional(self: Any, x: Tensor, factor: float = 1.0, mask: Tensor | None = None, *, twice: bool = False) -> Tensor:
    y = self.a(x) * factor
    if mask is not None:
        y = y.masked_fill(mask, 0.0)
    return 2 * y if twice else y


def test_optional_arguments_keep_their_defaults() -> None:
    net, x = Plain(optional, a=linear()).eval(), draw(3, 8)
    model = qat.prepare(net, example_inputs=draw(2, 8))
    assert_computes_as(net, model, x)
    passing, others = without_quantizers(model), {"factor": 2.0, "mask": torch.ones(3, 8).bool(), "twice": True}
    for (name, value), shown in zip(others.items(), ("1.0", "None", "False"), strict=True):
        with refused(
            f"the model was prepared for its argument {name!r} being {shown}; to use another, prepare it with"
            " example_inputs that contain one"
        ):
            passing(x, **{name: value})


def test_optional_arguments_with_an_example_are_arguments() -> None:
    net, x, mask = Plain(optional, a=linear()).eval(), draw(3, 8), torch.rand(3, 8) > 0.5
    model = qat.prepare(net, example_inputs={"x": x, "mask": mask})
    assert_computes_as(net, model, x=x, mask=mask)
    assert_computes_as(net, model, x=x, mask=~mask)
    # Neither the mask nor anything that is computed from it alone is quantized.
    assert checks.activation_quantizers(model) == ["x_quantizer"]
    in_order = qat.prepare(net, example_inputs=(x, 2.0, mask))
    assert_computes_as(net, in_order, x, 2.0, mask)


def by_name(self: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
    if not batch or "a" not in batch or batch.get("c") is not None:
        raise AssertionError
    done = {name: self.a(tensor) for name, tensor in batch.items()}
    return {"all": done, "sum": [batch["a"].sum() + done["b"].mean()], "count": len(batch)}


def test_mappings_and_lists_go_in_and_out() -> None:
    mapping, sequence = {"a": draw(3, 8), "b": draw(2, 8)}, [draw(3, 8), draw(2, 8)]
    for forward, batch in ((by_name, mapping), (lambda self, xs: [self.a(x) for x in xs], sequence)):
        net = Plain(forward, a=linear()).eval()
        assert_computes_as(net, qat.prepare(net, example_inputs=(batch,)), batch)


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.chunk(2, 1))


def doubled(x: Tensor, times: int) -> Tensor:
    return x * 2 if int(times) > 0 else x


torch.fx.wrap("halves")
torch.fx.wrap("doubled")


def test_wrapped_functions_are_taken_apart() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        first, second = halves(doubled(x, 3))
        return self.a(first) + self.b(second)

    model = prepared_alike(Plain(forward, a=linear(4), b=linear(4)).eval(), draw(4, 8))
    # One grid passes the split: the function's operations are part of the graph.
    assert len(checks.activation_quantizers(model)) == 1 and notes_of(model, LEFT_IN_FLOAT) == {}


def test_constants_follow_the_model_and_are_no_state() -> None:
    net = Plain(lambda self, x: self.a(x * torch.tensor([1.0, 1.1] * 4)) + torch.ones(8), a=linear()).eval()
    x = draw(3, 8)
    model = prepared_alike(net, x)
    checks.assert_takes_float_state(model, net.state_dict())
    wide = without_quantizers(model).double()(x.double())
    assert wide.dtype is torch.float64
    factors = torch.tensor([1.0, 1.1] * 4).double()  # 1.1 as float32 holds it
    expected = (x.double() * factors) @ net.a.weight.double().T + net.a.bias.double() + 1
    torch.testing.assert_close(wide, expected, rtol=1e-12, atol=1e-12)


def test_without_example_inputs_layers_are_quantized_one_by_one() -> None:
    net, x = Plain(lambda self, x: self.b(self.a(x).relu()) / len(x), a=linear(), b=linear()), draw(3, 8)
    model = qat.prepare(net)
    assert notes_of(model, LEFT_IN_FLOAT)["(the model)"] == (
        "prepared in parts, since there are no example_inputs, with which the model would be one graph"
    )
    assert checks.activation_quantizers(model) == ["a.input_quantizer", "b.input_quantizer"]
    assert_computes_as(net, model, x)


def test_preparation_holds_no_more_activations_than_a_forward() -> None:
    """Point 19: every activation of both modes was kept to the end, 17 forwards of memory for a ResNet-50."""
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def count(_: nn.Module, __: Any, y: Tensor) -> None:
        nonlocal most
        made.append(weakref.ref(y))
        most = max(most, sum(ref() is not None for ref in made))

    model = nn.Sequential(nn.Conv2d(2, 2, 3), *(nn.Tanh() for _ in range(20)))
    for layer in model[1:]:
        layer.register_forward_hook(count)
    qat.prepare(model, example_inputs=torch.randn(2, 2, 5, 5))
    assert len(made) > 40 and most <= 5
    gc.collect()
    assert not any(ref() is not None for ref in made)


def test_a_value_that_is_computed_again_does_not_end_the_one_that_reads_it() -> None:
    """What `x.mT` gives is kept by nothing: a module that reads it ran as if it were traced, and so in parts."""
    model = Plain(lambda self, x: self.b(self.a(x).mT), a=nn.Linear(4, 6), b=nn.Linear(5, 2))
    assert prepared_parts(qat.prepare(model, example_inputs=torch.randn(3, 5, 4))).keys() == {""}
