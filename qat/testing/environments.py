"""Checks on meta tensors, in the compiler, of layouts, dtypes, no elements, NaN."""

from typing import Any

import torch
from torch import Tensor

from qat.contexts import warnings_ignored
from qat.testing.derivatives import require_same_nones
from qat.testing.estimator import Estimator, Inputs, as_leaves, filled, pull_back
from qat.testing.report import GradcheckError, index_of, largest, number, raising, uneven

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SINGLE = torch.finfo(torch.float32).eps
SWEEP = 24  # values of x between zero and each given one
LAYOUTS = ("every second element", "transposed", "channels_last")


def check_meta(estimator: Estimator, inputs: Inputs) -> str:
    """Check shape, dtype and device of output and gradients on meta tensors."""
    for dtype in (torch.float64, torch.bfloat16):
        words = f"{short(dtype)}: "
        y, expected = estimator.gradients(tuple(tensor.to(dtype) for tensor in inputs))
        with raising(words):
            given = tuple(tensor.to("meta", dtype) for tensor in inputs)
            got, gradients = estimator.gradients(given, torch.empty_like(y, device="meta"))
        require_same_nones(words, gradients, expected, "and on the CPU it is")
        for slot, (mine, theirs) in enumerate(zip((got, *gradients), (y, *expected), strict=True), start=-1):
            if mine is not None and theirs is not None:
                found, wanted = (f"{short(each.dtype)}{list(each.shape)}" for each in (mine, theirs))
                if (found, mine.device.type) != (wanted, "meta"):
                    what = f"gradient of slot {slot}" if slot >= 0 else "output"
                    raise GradcheckError(f"{words}{what}: got {found} on {mine.device.type}, expected {wanted} on meta")
    return "float64 and bfloat16"


def short(dtype: torch.dtype) -> str:
    """Return the dtype's name without torch, as in 'float32'."""
    return str(dtype).removeprefix("torch.")


def check_compile(estimator: Estimator, inputs: Inputs) -> str:
    """Check that `torch.compile(fullgraph=True)` gives the same output and gradients."""
    y, expected = estimator.gradients(inputs)
    for slot, tensor in enumerate(inputs):
        if estimator.output(inputs).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            raise GradcheckError(
                f"the output shares its memory with slot {slot}: return a new tensor, else the compiler of torch 2.11 "
                "loses the gradient"
            )

    def whole(*tensors: Tensor) -> Any:
        return estimator.function(*tensors)

    leaves = as_leaves(inputs)
    with warnings_ignored():  # the compiler's own, which differ between torch versions
        torch.compiler.reset()  # every check compiles anew, and leaves nothing behind
        try:
            with raising("torch.compile "):
                got = torch.compile(whole, fullgraph=True, backend=estimator.backend)(*leaves)
                gradients = pull_back(got, leaves, uneven(y))
        finally:
            torch.compiler.reset()
    estimator.require_same("compiled: ", (got, *gradients), (y, *expected), inputs)
    backend = estimator.backend if isinstance(estimator.backend, str) else "the given backend"
    return f"fullgraph with {backend}"


def check_layouts(estimator: Estimator, inputs: Inputs) -> str:
    """Check that strides of x or of the gradient change no value."""
    x = estimator.with_axes(inputs[0], 4).contiguous()
    y, expected = estimator.gradients((x, *inputs[1:]))
    for name in LAYOUTS:
        words = f"{name}: "
        variant = _arranged(x, name)
        with raising(words):
            got, gradients = estimator.gradients((variant, *inputs[1:]), _arranged(uneven(y), name))
        estimator.require_same(words, (got, *gradients), (y, *expected), (x, *inputs[1:]))
        spoilt = name == "channels_last" and not got.is_contiguous(memory_format=torch.channels_last)
        if spoilt and got.shape == x.shape and x.ndim == 4:
            raise GradcheckError(f"{words}the output has strides {got.stride()}, expected {variant.stride()}")
    words = "expanded incoming gradient: "
    with raising(words):
        _, gradients = estimator.gradients((x, *inputs[1:]), torch.ones((), dtype=y.dtype).expand(y.shape))
    expected = estimator.gradients((x, *inputs[1:]), torch.ones_like(y))[1]
    estimator.require_same(words, (y, *gradients), (y, *expected), (x, *inputs[1:]))
    return f"{', '.join(LAYOUTS)} for x of shape {tuple(x.shape)}"


def _arranged(x: Tensor, layout: str) -> Tensor:
    # The same values with other strides, where x has the axes for it
    if layout == "every second element" and x.ndim:
        return x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2].copy_(x)
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def check_dtypes(estimator: Estimator, inputs: Inputs) -> str:
    """Check that dtypes are kept, and values are those of float32 arithmetic at least.

    Output and gradients of narrow inputs must equal those of the same inputs in float64, within 4 epsilons of their
    dtype and 64 float32 epsilons of the largest value. Elements count where moving each input by 8 float32 epsilons
    changes neither the output nor the gradient of x: not at a tie or a bound.
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
    wide = tuple(tensor.double() for tensor in narrow)
    for slot, (mine, given) in enumerate(zip(estimator.results(narrow), (narrow[0], *narrow), strict=True), start=-1):
        if mine is not None and mine.dtype != given.dtype:
            what = f"gradient of slot {slot}" if slot >= 0 else "output"
            raise GradcheckError(f"{words}the {what} is {short(mine.dtype)}, expected {short(given.dtype)}")
    y, of_x, *_ = estimator.results(wide)
    moves = [1 + sign * 8 * SINGLE for sign in (1, -1)]
    jumps = torch.zeros_like(y, dtype=torch.bool)
    for slot, move in ((slot, move) for slot in range(len(wide)) for move in moves):
        other, of_moved, *_ = estimator.results((*wide[:slot], wide[slot] * move, *wide[slot + 1 :]))
        jumps |= (other - y).abs() > 64 * SINGLE * y.abs() + 64 * SINGLE * largest(y)
        if of_x is not None and of_moved is not None and of_x.shape == y.shape:
            jumps |= (of_moved - of_x).abs() > 1e-3 * of_x.abs()
    cotangent = torch.where(jumps, 0, uneven(y)).to(narrow[0].dtype)
    got, expected = estimator.results(narrow, cotangent), estimator.results(wide, cotangent.double())
    sized = estimator.results(wide, cotangent.double() * torch.sign(uneven(y, seed=3)))
    for slot, (mine, theirs) in enumerate(zip(got, expected, strict=True), start=-1):
        if mine is not None and theirs is not None:
            eps, size = torch.finfo(mine.dtype).eps, max(largest(theirs), largest(sized[slot + 1]))
            kept = ~jumps if slot < 0 else torch.ones_like(theirs, dtype=torch.bool)
            mine, theirs = (torch.where(kept, each.to(mine.dtype).double(), 0) for each in (mine, theirs))
            what = f"{words}gradient of slot {slot}" if slot >= 0 else f"{words}output"
            estimator.require_close(what, mine, theirs, narrow[0], rtol=4 * eps, atol=64 * SINGLE * size)


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


def check_empty(estimator: Estimator, inputs: Inputs) -> str:
    """Check the gradients where x has no element: their shapes, zeros for parameters."""
    usual, x = estimator.gradients(inputs)[1], inputs[0]
    single = tuple(p.flatten()[0] if slot in estimator.broadcast else p for slot, p in enumerate(inputs[1:], start=1))
    empty = (x.new_empty((0, *x.shape)), *inputs[1:]) if estimator.elementwise else (x[:0], *single)
    words = f"x of shape {tuple(empty[0].shape)}: "
    with raising(words):
        _, gradients = estimator.gradients(empty)
    for slot, (gradient, before) in enumerate(zip(gradients, usual, strict=True)):
        if gradient is None and before is not None:
            raise GradcheckError(f"{words}slot {slot} gets no gradient, but it gets one otherwise")
    zeros = [torch.zeros_like(tensor) for tensor in empty]
    for slot, (gradient, zero) in enumerate(zip(filled(gradients, empty), zeros, strict=True)):
        estimator.require_close(f"{words}gradient of slot {slot}", gradient, zero, rtol=0, atol=0)
    return f"x of shape {tuple(empty[0].shape)}"


def check_nan_inf(estimator: Estimator, inputs: Inputs) -> str:
    """Check that NaN stays NaN, infinities give none, and other elements stay.

    If the function is not elementwise, NaN in x only has to give NaN somewhere. -inf is tried only if x has values
    below zero, which shows that they belong to its domain.
    """
    x, usual = inputs[0], estimator.results(inputs)
    values = [float("nan"), float("inf"), *[-float("inf")] * bool((x < 0).any())]
    places = sorted({0, x.numel() // 2, x.numel() - 1})
    for place, value in ((place, value) for place in places for value in values):
        index = index_of(place, x.shape)
        changed, words = x.clone(), f"x = {value} at {list(index)}: "
        changed[index] = value
        if not estimator.elementwise:
            if value != value and not estimator.output((changed, *inputs[1:])).isnan().any():
                raise GradcheckError(f"{words}no element of the output is NaN")
            continue
        with raising(words):
            disturbed = estimator.results((changed, *inputs[1:]), uneven(usual[0]))
        if disturbed[0].shape != x.shape:
            raise GradcheckError(f"{words}the output of an elementwise function has shape {tuple(disturbed[0].shape)}")
        own = disturbed[0][index]
        if bool(own.isnan()) != (value != value):
            raise GradcheckError(f"{words}the output there is {number(own)}" + ", expected nan" * (value != value))
        for name, mine, theirs in zip(("output", "gradient of slot 0"), disturbed[:2], usual[:2], strict=True):
            if mine is not None and theirs is not None:
                mine[index] = theirs[index]
                estimator.require_close(f"{words}{name}", mine, theirs, x)
    what = ", ".join(map(str, values)) if estimator.elementwise else "nan"
    return f"{what} at {len(places)} of {x.numel()} elements"
