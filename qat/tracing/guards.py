"""Guards: nodes that refuse inputs for which the float model would take another branch than the traced one."""

from typing import Any

import torch
from torch import fx
from torch.fx.node import has_side_effect


@has_side_effect
def expect_same(value: Any, expected: Any, where: str) -> None:
    """Raise a ValueError if a value differs from its value for the example inputs."""
    if isinstance(value, fx.Proxy):  # unpickling traces the code again
        value.tracer.create_proxy("call_function", expect_same, (value, expected, where), {})
    elif value != expected:
        raise ValueError(
            f"{where}: a size that decides the way through the model is {value!r}, and it was {expected!r} for the"
            " example_inputs of prepare; prepare the model again with inputs of this size"
        )


@has_side_effect
def expect_default(value: Any, default: Any, name: str) -> None:
    """Raise a ValueError if an argument of forward is not its default, for which the model was prepared."""
    if isinstance(value, fx.Proxy):
        value.tracer.create_proxy("call_function", expect_default, (value, default, name), {})
    elif value is not default and (isinstance(value, torch.Tensor) or value != default):
        raise ValueError(
            f"the model was prepared for its argument {name!r} being {default!r}; to use another, prepare it with"
            " example_inputs that contain one"
        )
