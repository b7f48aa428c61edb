"""The check in every floating-point dtype."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qat.testing.comparison import largest, require_none, short, uneven
from qat.testing.estimator import Estimator, Inputs, filled
from qat.testing.report import GradcheckError, raising

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SINGLE = torch.finfo(torch.float32).eps
MOVE = 8 * SINGLE
"""Inputs are moved by this relative amount; float32 arithmetic may give any of the outcomes."""
SWEEP = 24


def check_dtypes(estimator: Estimator, inputs: Inputs) -> str:
    """float16, bfloat16, float32, float64: dtypes are kept, and values are those of float32 arithmetic at least.

    The output must equal the float64 output for the same (narrow) inputs, rounded to the dtype of x, within 16 float32
    epsilons of its largest value. Where moving an input by 8 float32 epsilons changes the output (at a tie or a
    bound), anything between the outcomes passes. Gradients have the dtype of their input. They are compared where the
    output and the gradient of x do not jump, within 4 epsilons of that dtype and 64 float32 epsilons of the slot's
    largest gradient. Values of x beyond the range of a dtype are clamped to it.
    """
    inputs = _swept(estimator, inputs)
    for dtype in DTYPES:
        for own in dict.fromkeys((dtype, torch.float32 if dtype.itemsize < 4 else dtype)):
            reach = torch.finfo(dtype).max
            narrow = (inputs[0].clamp(-reach, reach).to(dtype), *(parameter.to(own) for parameter in inputs[1:]))
            words = short(dtype) if own == dtype or len(inputs) == 1 else f"{short(dtype)} with float32 parameters"
            with raising(f"{words}: "):
                _check_one(estimator, f"{words}: ", narrow)
    return f"{', '.join(map(short, DTYPES))} at {inputs[0].numel()} values of x"


def _check_one(estimator: Estimator, words: str, narrow: Inputs) -> None:
    x, wide = narrow[0], tuple(tensor.double() for tensor in narrow)
    y, gradients = estimator.gradients(narrow)
    _require_dtypes(words, y, gradients, narrow)
    moved = list(_moved(estimator, wide))
    outcomes = [estimator.gradients(each) for each in moved]
    low, high = _envelope([output for output, _ in outcomes])
    margin = 16 * SINGLE * largest(high)
    below, above = (low - margin).to(x.dtype).double(), (high + margin).to(x.dtype).double()
    wide_y = outcomes[0][0]
    wrong = (y.double() < below) | (y.double() > above) | (y.isnan() != wide_y.isnan())
    require_none(f"{words}output", wrong, y, wide_y.to(x.dtype), x)
    jumps = high - low > 4 * margin + MOVE * 64 * high.abs()
    lows_highs = _envelope([filled(found, wide)[0] for _, found in outcomes])
    if wide_y.shape == x.shape:
        jumps |= lows_highs[1] - lows_highs[0] > 1e-3 * lows_highs[1].abs()
    cotangent = torch.where(jumps, 0, uneven(y)).to(y.dtype)
    got = filled(estimator.gradients(narrow, cotangent)[1], narrow)
    around = [filled(estimator.gradients(each, cotangent.double())[1], wide) for each in moved]
    signs = torch.sign(uneven(y, seed=3))
    sized = filled(estimator.gradients(wide, cotangent.double() * signs)[1], wide)
    for slot, tensor in enumerate(narrow):
        low, high = _envelope([found[slot] for found in around])
        expected, eps = around[0][slot], torch.finfo(tensor.dtype).eps
        allowed = 4 * eps * expected.abs() + torch.finfo(tensor.dtype).tiny
        allowed = allowed + 64 * SINGLE * max(largest(expected), largest(sized[slot]))
        mine = got[slot].double()
        below, above = ((low - allowed).to(tensor.dtype).double(), (high + allowed).to(tensor.dtype).double())
        wrong = (mine < below) | (mine > above) | (mine.isnan() != expected.isnan())
        require_none(f"{words}gradient of slot {slot}", wrong, mine, expected, x)


def _require_dtypes(words: str, y: Tensor, gradients: Sequence[Tensor | None], inputs: Inputs) -> None:
    if y.dtype != inputs[0].dtype:
        raise GradcheckError(f"{words}the output is {short(y.dtype)}, expected {short(inputs[0].dtype)}")
    for slot, (gradient, tensor) in enumerate(zip(gradients, inputs, strict=True)):
        if gradient is not None and gradient.dtype != tensor.dtype:
            found, right = short(gradient.dtype), short(tensor.dtype)
            raise GradcheckError(f"{words}the gradient of slot {slot} is {found}, expected {right}")


def _swept(estimator: Estimator, inputs: Inputs) -> Inputs:
    """Many values between zero and x, off bounds and ties, and as many parameters whose mantissas use many bits.

    Dividing x by a scale with a short mantissa is as exact in bfloat16 as in float32, by one with a long mantissa not.
    """
    if not estimator.elementwise:
        return inputs
    k = torch.arange(SWEEP, dtype=torch.float64).reshape(SWEEP, *[1] * inputs[0].ndim)
    swept = [inputs[0] * (1 - k * 0.9871 / SWEEP)]
    for slot, parameter in enumerate(inputs[1:], start=1):
        alone = slot in estimator.broadcast and parameter.numel() == 1
        swept.append(parameter.flatten() * (1 + 0.875 * torch.frac(k * 0.6180339887)) if alone else parameter)
    return tuple(swept)


def _moved(estimator: Estimator, inputs: Inputs) -> Iterator[Inputs]:
    """The inputs unchanged, then with each one moved up and down by a rounding error."""
    yield inputs
    for slot, tensor in enumerate(inputs):
        patterns = [torch.ones_like(tensor)]
        if tensor.numel() > 1 and not (slot == 0 and estimator.elementwise):
            patterns += [torch.sign(uneven(tensor, seed)) for seed in (1, 2, 3)]
        for pattern in patterns:
            for sign in (1, -1):
                yield *inputs[:slot], tensor * (1 + sign * MOVE * pattern), *inputs[slot + 1 :]


def _envelope(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    together = torch.stack(list(values))
    return together.amin(0), together.amax(0)
