"""What moves quantized tensors about without changing a value: on codes, a quarter of the bytes."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from qat.fused.functions.codes import Codes, connected, decode


def reshape(x: Codes | Tensor, method: str, *args: Any, **kwargs: Any) -> Codes | Tensor:
    """x.method(*args, **kwargs), of codes where x is such: `flatten`, `transpose` and their like."""
    return _moved(x, lambda tensor: getattr(tensor, method)(*args, **kwargs))


def reshape_by(x: Codes | Tensor, module: nn.Module) -> Codes | Tensor:
    """module(x), of codes where x is such: `nn.Flatten` and its like."""
    return _moved(x, module)


def drop(x: Codes | Tensor, dropout: Any) -> Codes | Tensor:
    """dropout(x): x itself while nothing is dropped, else the float tensor, which lies on no grid any more."""
    if not (dropout.training and dropout.p > 0):
        return x
    y: Tensor = dropout(decode(x))
    return y


def shape_of(x: Codes | Tensor) -> Tensor:
    """A float tensor of x's shape and device, to be asked for these only."""
    return x if isinstance(x, Tensor) else x.carrier


def _moved(x: Codes | Tensor, operation: Callable[[Tensor], Tensor]) -> Codes | Tensor:
    if isinstance(x, Tensor):
        return operation(x)
    x = connected(x)
    return Codes(operation(x.carrier), operation(x.codes), x.numbers)
