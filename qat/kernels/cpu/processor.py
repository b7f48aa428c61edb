"""The kind of processor that a machine should pass for, so that tests cover both.

Processors with VNNI multiply uint8 by int8 exactly. x86 without it adds pairs of products in 16 bits, which saturates
in oneDNN's kernels and in ONNX Runtime's default ones; this library uses neither there.
"""

import os
from typing import Literal, cast, get_args

VARIABLE = "QAT_PROCESSOR"

Processor = Literal["vnni", "no-vnni"]


def asked_for() -> Processor | None:
    """Return the value of QAT_PROCESSOR, or None to take the machine as it is.

    `vnni` on a machine without it: integer products are emulated, slowly and with the same results. `no-vnni` on a
    machine with it: integer products are not used, and ONNX Runtime's default session counts as inexact.
    """
    value = os.environ.get(VARIABLE)
    if value not in (None, *get_args(Processor)):
        raise ValueError(f"{VARIABLE} must be vnni, no-vnni or unset, got {value!r}")
    return cast("Processor | None", value)
