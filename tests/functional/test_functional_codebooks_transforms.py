"""Binary, ternary, N2UQ, floats and microscaling under torch's transforms."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor

from qat.functional.codebooks.binary import BinaryFunction, binary_quantize
from qat.functional.codebooks.floats import FloatFunction, float_quantize
from qat.functional.codebooks.microscaling import mx_quantize
from qat.functional.codebooks.n2uq import n2uq_quantize
from qat.functional.codebooks.ternary import TernaryFunction, ternary_quantize, ttq_quantize

INF, NAN = math.inf, math.nan


def leaf(values: object, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).clone().requires_grad_()


def slopes(y: Tensor, *inputs: Tensor) -> list[list[float]]:
    """The gradients of the sum of y."""
    return [gradient.tolist() for gradient in torch.autograd.grad(y.sum(), inputs)]


def same(got: Tensor, expected: object) -> None:
    expected = torch.as_tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# Every function under the transforms of torch

SPREAD = torch.linspace(-2.1, 2.3, 12).reshape(3, 4)
FUNCTIONS = {
    **{f"binary {name}": (partial(binary_quantize, gradient=name), (SPREAD,))
       for name in ("clipped", "approximate", "straight_through")},
    "binary error_decay": (lambda w, p: binary_quantize(w, 0, "error_decay", p), (SPREAD, torch.tensor(0.3))),
    "binary whole": (partial(binary_quantize, channel_axis=None), (SPREAD,)),
    "ternary": (ternary_quantize, (SPREAD,)),
    "ttq": (ttq_quantize, (SPREAD, torch.tensor([[1.5], [0.5], [1.0]]), torch.tensor(0.7))),
    "n2uq": (n2uq_quantize, (SPREAD, torch.tensor(-1.0), torch.tensor([1.0, 2.0, 0.5]), torch.tensor(0.4))),
    "float": (partial(float_quantize, format="e2m1"), (SPREAD, torch.tensor([[0.3], [0.1], [1.0]]))),
    "mx": (partial(mx_quantize, format="e2m3", block_size=2), (SPREAD,)),
    "mx axis 0": (partial(mx_quantize, format="int8", axis=0), (SPREAD,)),
}  # fmt: skip
EACH = pytest.mark.parametrize(("function", "inputs"), FUNCTIONS.values(), ids=FUNCTIONS.keys())


def pulled(function, inputs, grad=None) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradient of every input, zeros for None."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    y = function(*leaves)
    grad = torch.linspace(-1.0, 2.0, y.numel()).reshape(y.shape).to(y.dtype) if grad is None else grad
    return y.detach(), list(torch.autograd.grad(y, leaves, grad, allow_unused=True, materialize_grads=True))


@EACH
def test_compiled_whole_it_computes_the_same(function, inputs):
    torch.compiler.reset()
    expected = pulled(function, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that of torch 2.11's compiler about its own doing
        got = pulled(torch.compile(lambda *x: function(*x), fullgraph=True, backend="aot_eager"), inputs)
    torch.testing.assert_close(got, expected)
    torch.compiler.reset()


@EACH
def test_forward_mode_is_the_transpose_of_backward(function, inputs):
    inputs = [each.double() for each in inputs]
    tangents = [torch.linspace(-0.5, 1.0, each.numel(), dtype=each.dtype).reshape(each.shape) for each in inputs]
    y, tangent = torch.func.jvp(function, tuple(inputs), tuple(tangents))
    grad = torch.linspace(-1.0, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)
    expected, gradients = pulled(function, inputs, grad)
    same(y, expected)
    along = sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True))
    torch.testing.assert_close((grad * tangent).sum(), along)
    assert tangent.any()


@EACH
def test_vmap_over_all_inputs_is_a_loop(function, inputs):
    many = tuple(torch.stack([each, each * 0.7 + 0.05, each * 0.5]) for each in inputs)

    def loss(*x: Tensor) -> Tensor:
        return (function(*x) * torch.linspace(-1.0, 2.0, 12).reshape(3, 4)).sum()

    slots = tuple(range(len(inputs)))
    outputs = torch.func.vmap(function)(*many)
    gradients = torch.func.vmap(torch.func.grad(loss, argnums=slots))(*many)
    for k in range(3):
        expected, expected_gradients = pulled(function, [each[k] for each in many])
        same(outputs[k], expected)
        for got, wanted in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(got[k], wanted)


@EACH
def test_shapes_without_data_and_without_elements(function, inputs):
    y, gradients = pulled(function, [each.to("meta") for each in inputs], torch.empty(3, 4, device="meta"))
    assert y.is_meta and y.shape == (3, 4)
    assert [each.shape for each in gradients] == [each.shape for each in inputs]
    y, gradients = pulled(function, [inputs[0][:, :0], *inputs[1:]])
    assert y.shape == (3, 0)
    assert [each.shape for each in gradients] == [(3, 0), *(each.shape for each in inputs[1:])]
    assert not any(each.any() for each in gradients)


@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_kept_and_computed_wide(function, inputs, dtype):
    """The output is that of the same numbers in float64, rounded to dtype once or twice."""
    inputs = [each.to(dtype) for each in inputs]
    y, gradients = pulled(function, inputs)
    assert {each.dtype for each in (y, *gradients)} == {dtype}
    wide = function(*(each.double() for each in inputs))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), wide, rtol=eps, atol=1e-8)


def test_gradients_that_are_not_asked_for_are_not_computed():
    class Context:
        saved_tensors = (SPREAD, torch.tensor(1.0))
        needs_input_grad = (False, False, False)
        format = "e4m3"

    assert FloatFunction.backward(Context(), SPREAD) == (None, None, None)
    scale, progress = leaf([[1.0]]), leaf(0.5)
    y = BinaryFunction.apply(leaf(SPREAD), scale, "error_decay", progress)
    assert torch.autograd.grad(y.sum(), [scale, progress], allow_unused=True) == (None, None)
    y = TernaryFunction.apply(leaf(SPREAD), scale, leaf([[0.5]]))
    assert torch.autograd.grad(y.sum(), [scale], allow_unused=True) == (None,)
