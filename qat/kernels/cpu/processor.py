"""The kind of processor that this machine is to be taken for, so that tests see the other kind too.

Processors with VNNI multiply uint8 by int8 exactly. x86 without it adds pairs of products in 16 bits, where the kernels
of oneDNN and those that ONNX Runtime takes by default saturate; nothing of this library relies on either there.
"""

import os
from typing import Literal, cast, get_args

VARIABLE = "QAT_PROCESSOR"

Processor = Literal["vnni", "no-vnni"]


def asked_for() -> Processor | None:
    """What the environment's QAT_PROCESSOR says; None: this machine is what it is.

    `vnni` where there is none: integer products are emulated, slowly and with the same numbers. `no-vnni` where there
    is: they are left alone, and ONNX Runtime's default session counts as inexact.

    Raises:
        ValueError: for another value.
    """
    value = os.environ.get(VARIABLE)
    if value not in (None, *get_args(Processor)):
        raise ValueError(f"{VARIABLE} must be vnni, no-vnni or unset, got {value!r}")
    return cast("Processor | None", value)
