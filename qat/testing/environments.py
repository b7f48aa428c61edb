"""Checks on meta tensors, in the compiler, of layouts, dtypes, no elements, NaN."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qat.contexts import warnings_ignored
from qat.testing.estimator import Estimator, Inputs, as_leaves, filled, pull_back, with_axes, without_elements
from qat.testing.report import (
    GradcheckError,
    index_of,
    largest,
    number,
    raising,
    require_close,
    require_none,
    short,
    uneven,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SINGLE = torch.finfo(torch.float32).eps
MOVE = 8 * SINGLE  # inputs are moved by this relative amount; float32 arithmetic may give any of the outcomes
SWEEP = 24  # values of x between zero and each given one


def check_meta(estimator: Estimator, inputs: Inputs) -> str:
    """Check shape, dtype and device of output and gradients on meta tensors."""
    for dtype in (torch.float64, torch.bfloat16):
        y, expected = estimator.gradients(tuple(tensor.to(dtype) for tensor in inputs))
        words = f"{short(dtype)}: "
        with raising(words):
            got, gradients = estimator.gradients(
                tuple(tensor.to("meta", dtype) for tensor in inputs), torch.empty_like(y, device="meta")
            )
        _require_alike(f"{words}output", got, y)
        for slot, (mine, theirs) in enumerate(zip(gradients, expected, strict=True)):
            if (mine is None) != (theirs is None):
                gets = "no gradient" if mine is None else "a gradient"
                raise GradcheckError(f"{words}slot {slot} gets {gets}, unlike on the CPU")
            if mine is not None and theirs is not None:
                _require_alike(f"{words}gradient of slot {slot}", mine, theirs)
    return "float64 and bfloat16"


def _require_alike(words: str, got: Tensor, expected: Tensor) -> None:
    mine = f"{short(got.dtype)}{list(got.shape)} on {got.device.type}"
    theirs = f"{short(expected.dtype)}{list(expected.shape)} on meta"
    if mine != theirs:
        raise GradcheckError(f"{words}: got {mine}, expected {theirs}")


def check_compile(estimator: Estimator, inputs: Inputs) -> str:
    """Check that `torch.compile(fullgraph=True)` gives the same output and gradients."""
    for slot, tensor in enumerate(inputs):
        if estimator.output(inputs).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            raise GradcheckError(
                f"the output shares its memory with slot {slot}: return a new tensor, else the compiler of torch 2.11 "
                "loses the gradient"
            )
    y, expected = estimator.gradients(inputs)

    def whole(*tensors: Tensor) -> Any:
        return estimator.function(*tensors)

    with warnings_ignored():  # the compiler's own, which differ between torch versions
        torch.compiler.reset()  # every check compiles anew, and leaves nothing behind
        try:
            with raising("torch.compile "):
                compiled = torch.compile(whole, fullgraph=True, backend=estimator.backend)
                leaves = as_leaves(inputs)
                got = compiled(*leaves)
                gradients = pull_back(got, leaves, uneven(y))
        finally:
            torch.compiler.reset()
    estimator.require_close("compiled output", got, y, inputs[0])
    estimator.require_same_gradients("compiled: ", gradients, expected, inputs)
    backend = estimator.backend if isinstance(estimator.backend, str) else "the given backend"
    return f"fullgraph with {backend}"


def check_layouts(estimator: Estimator, inputs: Inputs) -> str:
    """Check that strides of x or of the gradient change no value."""
    x = with_axes(estimator, inputs[0], 4).contiguous()
    arranged = (x, *inputs[1:])
    y, expected = estimator.gradients(arranged)
    layouts = _layouts(x)
    for name, variant in layouts.items():
        words = f"{name}: "
        with raising(words):
            cotangent = _layouts(uneven(y)).get(name, uneven(y))
            got, gradients = estimator.gradients((variant, *inputs[1:]), cotangent)
        estimator.require_close(f"{words}output", got, y, x)
        estimator.require_same_gradients(words, gradients, expected, arranged)
        # channels_last stays channels_last.
        spoilt = name == "channels_last" and not got.is_contiguous(memory_format=torch.channels_last)
        if spoilt and got.shape == x.shape:
            raise GradcheckError(f"{words}the output has strides {got.stride()}, expected {variant.stride()}")
    words = "expanded incoming gradient: "
    with raising(words):
        _, gradients = estimator.gradients(arranged, torch.ones((), dtype=y.dtype).expand(y.shape))
    _, expected = estimator.gradients(arranged, torch.ones_like(y))
    estimator.require_same_gradients(words, gradients, expected, arranged)
    return f"{', '.join(layouts) or 'expanded gradient'} for x of shape {tuple(x.shape)}"


def _layouts(x: Tensor) -> dict[str, Tensor]:
    found = {}
    if x.ndim:
        room = x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))
        found["every second element"] = room[..., ::2].copy_(x)  # strides of 2
    if x.ndim > 1:
        found["transposed"] = x.transpose(0, -1).contiguous().transpose(0, -1)
    if x.ndim == 4:
        found["channels_last"] = x.contiguous(memory_format=torch.channels_last)
    return found


def check_dtypes(estimator: Estimator, inputs: Inputs) -> str:
    """Check that dtypes are kept, and values are those of float32 arithmetic at least.

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
                _check_dtype(estimator, f"{words}: ", narrow)
    return f"{', '.join(map(short, DTYPES))} at {inputs[0].numel()} values of x"


def _check_dtype(estimator: Estimator, words: str, narrow: Inputs) -> None:
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
    # Gradients are not compared where the output or the gradient of x jumps within a rounding error.
    jumps = high - low > 4 * margin + MOVE * 64 * high.abs()
    least, most = _envelope([filled(found, wide)[0] for _, found in outcomes])
    if wide_y.shape == x.shape:
        jumps |= most - least > 1e-3 * most.abs()
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
    # Many values between zero and x, off bounds and ties, and as many parameters whose mantissas use many bits: by a
    # scale with a short mantissa the division is as exact in bfloat16 as in float32.
    if not estimator.elementwise:
        return inputs
    k = torch.arange(SWEEP, dtype=torch.float64).reshape(SWEEP, *[1] * inputs[0].ndim)
    swept = [inputs[0] * (1 - k * 0.9871 / SWEEP)]  # a factor that meets no tie of a grid
    for slot, parameter in enumerate(inputs[1:], start=1):
        alone = slot in estimator.broadcast and parameter.numel() == 1
        swept.append(parameter.flatten() * (1 + 0.875 * torch.frac(k * 0.6180339887)) if alone else parameter)
    return tuple(swept)


def _moved(estimator: Estimator, inputs: Inputs) -> Iterator[Inputs]:
    yield inputs
    for slot, tensor in enumerate(inputs):  # each one moved up and down by a rounding error
        patterns = [torch.ones_like(tensor)]  # all elements the same way; below, some against others
        if tensor.numel() > 1 and not (slot == 0 and estimator.elementwise):
            patterns += [torch.sign(uneven(tensor, seed)) for seed in (1, 2, 3)]
        for pattern in patterns:
            for sign in (1, -1):
                yield *inputs[:slot], tensor * (1 + sign * MOVE * pattern), *inputs[slot + 1 :]


def _envelope(values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    together = torch.stack(list(values))
    return together.amin(0), together.amax(0)


def check_empty(estimator: Estimator, inputs: Inputs) -> str:
    """Check the gradients where x has no element: their shapes, zeros for parameters."""
    usual = estimator.gradients(inputs)[1]
    empty = without_elements(estimator, inputs)
    words = f"x of shape {tuple(empty[0].shape)}: "
    with raising(words):
        _, gradients = estimator.gradients(empty)
    for slot, (gradient, tensor) in enumerate(zip(gradients, empty, strict=True)):
        if gradient is None:
            if usual[slot] is not None:
                raise GradcheckError(f"{words}slot {slot} gets no gradient, but it gets one otherwise")
            continue
        require_close(f"{words}gradient of slot {slot}", gradient, torch.zeros_like(tensor), 0, 0)
    return f"x of shape {tuple(empty[0].shape)}"


def check_nan_inf(estimator: Estimator, inputs: Inputs) -> str:
    """Check that NaN stays NaN, infinities give none, and other elements stay.

    If the function is not elementwise, NaN in x only has to give NaN somewhere. -inf is tried only if x has values
    below zero, which shows that they belong to its domain.
    """
    x = inputs[0]
    values = [float("nan"), float("inf"), *[-float("inf")] * bool((x < 0).any())]  # -inf only in the domain
    places = sorted({0, x.numel() // 2, x.numel() - 1})
    for place in places:
        index = index_of(place, x.shape)
        if not estimator.elementwise:
            y = estimator.output((_with(x, place, float("nan")), *inputs[1:]))
            if not y.isnan().any():
                raise GradcheckError(f"x = nan at {list(index)}: no element of the output is NaN")
            continue
        for value in values:
            _check_value(estimator, inputs, place, index, value)
    what = ", ".join(map(str, values)) if estimator.elementwise else "nan"
    return f"{what} at {len(places)} of {x.numel()} elements"


def _check_value(estimator: Estimator, inputs: Inputs, place: int, index: tuple[int, ...], value: float) -> None:
    x = inputs[0]
    words = f"x = {value} at {list(index)}: "
    y, gradients = estimator.gradients(inputs)
    with raising(words):
        got, disturbed = estimator.gradients((_with(x, place, value), *inputs[1:]), uneven(y))
    if got.shape != x.shape:
        raise GradcheckError(f"{words}the output of an elementwise function has shape {tuple(got.shape)}")
    own = got[index]
    if math.isnan(value) and not own.isnan():
        raise GradcheckError(f"{words}the output there is {number(own)}, expected nan")
    if not math.isnan(value) and own.isnan():
        raise GradcheckError(f"{words}the output there is nan")
    estimator.require_close(f"{words}output", _with(got, place, 0), _with(y, place, 0), x)
    if gradients[0] is not None and disturbed[0] is not None:
        mine, theirs = _with(disturbed[0], place, 0), _with(gradients[0], place, 0)
        estimator.require_close(f"{words}gradient of slot 0", mine, theirs, x)


def _with(x: Tensor, place: int, value: float) -> Tensor:
    changed = x.detach().clone(memory_format=torch.contiguous_format)
    changed.view(-1)[place] = value
    return changed
