"""Whether ONNX Runtime's default session multiplies exactly on this processor.

On x86 without VNNI its default kernels for uint8 by int8 add pairs of products in 16 bits, which saturate above 32,767:
255 * 127 + 255 * 127 is 64,770. With `EXACT_OPTION` in its options, a session converts weights to uint8, whose kernels
add in 32 bits; the same operators run. Other processors ignore the option.
"""

import functools
from importlib.metadata import version

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

    `with_option`: whether the session has `EXACT_OPTION`.
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
    from onnx import numpy_helper, parser

    model = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        extreme_products (uint8[1, {CHANNELS}] row, uint8[8, {CHANNELS}] rows, uint8[1, {CHANNELS}, 8, 8] images)
            => (int32[1, {CHANNELS}] one, int32[8, {CHANNELS}] many, int32[1, {CHANNELS}, 6, 6] convolved,
                int32[1, {CHANNELS}, 6, 6] in_groups) {{
            one = MatMulInteger(row, for_one)
            many = MatMulInteger(rows, for_many)
            convolved = ConvInteger(images, dense)
            in_groups = ConvInteger <group = {CHANNELS}> (images, depthwise)
        }}""")
    columns = np.where(np.arange(CHANNELS) % 2, -128, 127).astype(np.int8)
    filters = columns[:, None, None, None]
    # Two of each: where two weights share an initializer, a session with `EXACT_OPTION` refuses the file.
    weights = {
        "for_one": np.broadcast_to(columns, (CHANNELS, CHANNELS)),
        "for_many": np.broadcast_to(columns, (CHANNELS, CHANNELS)),
        "dense": np.broadcast_to(filters, (CHANNELS, CHANNELS, 3, 3)),
        "depthwise": np.broadcast_to(filters, (CHANNELS, 1, 3, 3)),
    }
    stored = (numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in weights.items())
    model.graph.initializer.extend(stored)
    content: bytes = model.SerializeToString()
    return content
