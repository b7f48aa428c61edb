"""Compares tensors and reports where the first difference is."""

import torch
from torch import Tensor

from qat.testing.report import GradcheckError


def uneven(like: Tensor, seed: int = 0) -> Tensor:
    """Float64 values of both signs and of sizes from 0.5 to 2, which reveal sums over wrong axes and lost signs."""
    k = torch.arange(1, like.numel() + 1, dtype=torch.float64)
    size = 0.5 + 1.5 * torch.frac(k * 0.6180339887 + seed * 0.3)
    negative = torch.frac(k * 0.7548776662 + seed * 0.2) < 0.4
    return torch.where(negative, -size, size).reshape(like.shape)


def require_close(what: str, got: Tensor, expected: Tensor, rtol: float, atol: float, x: Tensor | None = None) -> None:
    """Raise if two tensors differ; NaN equals NaN.

    Args:
        what: names the tensor in the error.
        got, expected: any floating dtype.
        rtol, atol: values are equal if |got - expected| <= atol + rtol * |expected|.
        x: the input; if it has the shape of the tensors, the error names its value.

    Raises:
        GradcheckError: with the first element that differs.
    """
    if got.shape != expected.shape:
        raise GradcheckError(f"{what}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    got, expected = got.detach().double(), expected.detach().double()
    require_none(what, ~torch.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True), got, expected, x)


def require_none(what: str, wrong: Tensor, got: Tensor, expected: Tensor, x: Tensor | None = None) -> None:
    """Raise if any element is marked as wrong.

    Raises:
        GradcheckError: with the first one.
    """
    if not wrong.any():
        return
    where = wrong.nonzero()[0]
    index = tuple(where.tolist())
    place = f" at {list(index)}" if index else ""
    if x is not None and x.shape == wrong.shape:
        place += f", where x = {number(x[index])}" if place else f" where x = {number(x[index])}"
    others = f"; {int(wrong.sum())} of {wrong.numel()} elements differ" if wrong.numel() > 1 else ""
    raise GradcheckError(f"{what}{place}: got {number(got[index])}, expected {number(expected[index])}{others}")


def index_of(place: int, shape: torch.Size) -> tuple[int, ...]:
    """The index of the element at this place of the flattened tensor."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(place), shape))


def short(dtype: torch.dtype) -> str:
    """'float32'."""
    return str(dtype).removeprefix("torch.")


def number(value: Tensor) -> str:
    """The value with up to ten significant digits."""
    return f"{value.item():.10g}"


def largest(values: Tensor) -> float:
    """The largest finite magnitude, 0 if there is none."""
    finite = values[values.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
