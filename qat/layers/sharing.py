"""One set of parameters for a float layer and its quantized twin, parametrisations included."""

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from qat.evaluating import evaluating


def share_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give the target the source's parameters, not copies, with their parametrisations if it has any."""
    parametrized: Any = source.parametrizations if parametrize.is_parametrized(source) else {}
    for name, originals in parametrized.items():
        with evaluating(source):  # where reading and registering (spectral norm) changes no state
            setattr(target, name, nn.Parameter(getattr(source, name).detach().clone()))
            for step in originals:
                parametrize.register_parametrization(target, name, step, unsafe=True)
        transferred: Any = target.parametrizations
        for key, parameter in originals.named_parameters(recurse=False):
            setattr(transferred[name], key, parameter)
    for name in target._parameters:
        if name in source._parameters:
            target._parameters[name] = source._parameters[name]
