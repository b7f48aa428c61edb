"""Operations that move codes without changing a value: reshapings, and dropouts that drop nothing."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from qat.codes.operators.codes import Codes
from qat.codes.operators.quantize import decode, with_scale_gradient


def reshape(x: Codes | Tensor, method: str, *args: Any, **kwargs: Any) -> Codes | Tensor:
    """x.method(*args, **kwargs) on a tensor or its codes: `flatten`, `transpose` and the like."""
    return _moved(x, lambda tensor: getattr(tensor, method)(*args, **kwargs))


def reshape_by(x: Codes | Tensor, module: nn.Module) -> Codes | Tensor:
    """module(x) on a tensor or its codes: `nn.Flatten` and the like."""
    return _moved(x, module)


def drop(x: Codes | Tensor, dropout: Any) -> Codes | Tensor:
    """dropout(x): x itself while nothing is dropped, else a float tensor, which is no longer on a grid."""
    if not (dropout.training and dropout.p > 0):
        return x
    y: Tensor = dropout(decode(x))
    return y


def shape_of(x: Codes | Tensor) -> Tensor:
    """A float tensor of x's shape and device, whose values mean nothing."""
    return x if isinstance(x, Tensor) else x.carrier


def _moved(x: Codes | Tensor, operation: Callable[[Tensor], Tensor]) -> Codes | Tensor:
    if isinstance(x, Tensor):
        return operation(x)
    x = with_scale_gradient(x)
    return Codes(operation(x.carrier), operation(x.codes), x.qparams)
