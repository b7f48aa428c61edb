"""`float_state_dict`: the state of a prepared model without its quantizers."""

from typing import Any

from torch import nn

from qat.inputs import expect_model
from qat.quantizer import Quantizer


def float_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict without the quantizers; the float model's `load_state_dict` takes it strictly.

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
