"""Operations that move codes without changing a value."""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from qat.codes.operators.codes import Codes
from qat.codes.operators.quantize import decode, with_scale_gradient


def reshape(x: Codes | Tensor, method: str, *args: object, **kwargs: object) -> Codes | Tensor:
    """Return x.method(*args, **kwargs) of a tensor or its codes, such as `flatten`."""
    return _moved(x, lambda tensor: getattr(tensor, method)(*args, **kwargs))


def reshape_by(x: Codes | Tensor, module: nn.Module) -> Codes | Tensor:
    """Return module(x) of a tensor or its codes, for `nn.Flatten` and the like."""
    return _moved(x, module)


def drop(x: Codes | Tensor, dropout: Any) -> Codes | Tensor:
    """Return x while nothing is dropped, else dropout(x), which lies on no grid."""
    if not (dropout.training and dropout.p > 0):
        return x
    return cast("Tensor", dropout(decode(x)))


def shape_of(x: Codes | Tensor) -> Tensor:
    """Return a float tensor of x's shape and device, whose values mean nothing."""
    return x if isinstance(x, Tensor) else x.carrier


def _moved(x: Codes | Tensor, operation: Callable[[Tensor], Tensor]) -> Codes | Tensor:
    if isinstance(x, Tensor):
        return operation(x)
    x = with_scale_gradient(x)
    return Codes(operation(x.carrier), operation(x.codes), x.qparams)
