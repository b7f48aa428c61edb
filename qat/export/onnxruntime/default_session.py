"""Whether ONNX Runtime's default session multiplies exactly on this processor.

On x86 without VNNI its default kernels for uint8 by int8 add pairs of products in 16 bits, which saturate above 32,767:
255 * 127 + 255 * 127 is 64,770. With `EXACT_OPTION` in its options, a session converts weights to uint8, whose kernels
add in 32 bits; the same operators run. Other processors ignore the option.
"""

import functools
from importlib.metadata import version
from typing import Any

import numpy as np

from qat.kernels.cpu import processor

EXACT_OPTION = ("session.x64quantprecision", "1")
"""Name and value, for `onnxruntime.SessionOptions().add_session_config_entry`."""

CHANNELS = 64


def default_is_exact() -> bool:
    """Whether a session without options multiplies exactly, on this processor or the one that QAT_PROCESSOR names."""
    asked = processor.asked_for()
    return multiplies_exactly(with_option=False) if asked is None else asked == "vnni"


def needs_option() -> bool:
    """Whether exact products need `EXACT_OPTION` on this processor.

    Raises:
        RuntimeError: if even a session with this option does not multiply exactly.
    """
    needed = not (default_is_exact() and multiplies_exactly(with_option=False))
    if needed and not multiplies_exactly(with_option=True):
        raise RuntimeError(
            f"ONNX Runtime {version('onnxruntime')} does not multiply integers exactly on this processor, with"
            f" {'='.join(EXACT_OPTION)} neither; nothing can be proven here, use another processor or version"
        )
    return needed


@functools.cache
def multiplies_exactly(with_option: bool) -> bool:
    """Whether extreme integers are multiplied exactly: one row, many rows, a convolution, and one in groups.

    Args:
        with_option: whether the session has `EXACT_OPTION`.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    if with_option:
        options.add_session_config_entry(*EXACT_OPTION)
    session = ort.InferenceSession(_extreme_products(), options, providers=["CPUExecutionProvider"])
    rows = np.full((8, CHANNELS), 255, np.uint8)
    images = np.full((1, CHANNELS, 8, 8), 255, np.uint8)
    one, many, dense, grouped = session.run(None, {"row": rows[:1], "rows": rows, "images": images})
    signs = np.where(np.arange(CHANNELS) % 2, -128, 127) * 255
    return bool(
        (one == CHANNELS * signs).all()
        and (many == CHANNELS * signs).all()
        and (dense == 9 * CHANNELS * signs[:, None, None]).all()
        and (grouped == 9 * signs[:, None, None]).all()
    )


def _extreme_products() -> bytes:
    """A file with each kind of product, for 255 by 127 and by -128."""
    from onnx import TensorProto, helper, numpy_helper

    lowest_and_highest = np.where(np.arange(CHANNELS) % 2, -128, 127).astype(np.int8)
    weights = {
        "for one": np.broadcast_to(lowest_and_highest, (CHANNELS, CHANNELS)),
        "for many": np.broadcast_to(lowest_and_highest, (CHANNELS, CHANNELS)),
        "dense": np.broadcast_to(lowest_and_highest[:, None, None, None], (CHANNELS, CHANNELS, 3, 3)),
        "depthwise": np.broadcast_to(lowest_and_highest[:, None, None, None], (CHANNELS, 1, 3, 3)),
    }
    nodes = [
        helper.make_node("MatMulInteger", ["row", "for one"], ["one"]),
        helper.make_node("MatMulInteger", ["rows", "for many"], ["many"]),
        helper.make_node("ConvInteger", ["images", "dense"], ["convolved"]),
        helper.make_node("ConvInteger", ["images", "depthwise"], ["in_groups"], group=CHANNELS),
    ]
    shapes: dict[str, Any] = {
        "row": [1, CHANNELS], "rows": [8, CHANNELS], "images": [1, CHANNELS, 8, 8],
        "one": [1, CHANNELS], "many": [8, CHANNELS], "convolved": [1, CHANNELS, 6, 6], "in_groups": [1, CHANNELS, 6, 6],
    }  # fmt: skip
    values = [
        helper.make_tensor_value_info(name, TensorProto.UINT8 if number < 3 else TensorProto.INT32, shape)
        for number, (name, shape) in enumerate(shapes.items())
    ]
    stored = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "extreme_products", values[:3], values[3:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    content: bytes = model.SerializeToString()
    return content
