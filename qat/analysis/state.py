"""`float_state_dict`: state without quantizers; `not_finite`: names of NaN values."""

from torch import Tensor, nn

from qat.inputs import expect_model
from qat.quantizer import Quantizer
from qat.text import some


def float_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict without quantizers, which the float model loads strictly.

    The opposite direction needs no function: `prepared.load_state_dict(float_model.state_dict(), strict=False)` misses
    only quantizers and finds no unexpected key. Call `calibrate` afterwards.

    >>> import qat
    >>> sorted(float_state_dict(qat.QuantLinear(4, 2)))
    ['bias', 'weight']
    """
    expect_model(float_state_dict, model)
    quantizers = [
        f"{name}." for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Quantizer)
    ]
    return {key: value for key, value in model.state_dict().items() if not key.startswith(tuple(quantizers))}


def not_finite(model: nn.Module) -> str:
    """Name tensors with NaN or infinity; masks among the buffers may be infinite."""
    # Attention masks hold minus infinity; running statistics must not.
    masks = {name for name, _ in model.named_buffers() if "running_" not in name}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = {name: tensor.isnan() if name in masks else ~tensor.isfinite() for name, tensor in state.items()}
    bad = [name for name, each in wrong.items() if not each.is_meta and bool(each.any())]
    return f"{some(bad)} of the model {'is' if len(bad) == 1 else 'are'} not finite" if bad else ""
