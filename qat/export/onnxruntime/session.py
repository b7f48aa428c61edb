"""ONNX Runtime sessions, and whether they multiply exactly on this processor.

On x86 without VNNI its default kernels for uint8 by int8 add pairs of products in 16 bits, which saturate above 32,767:
255 * 127 + 255 * 127 is 64,770. With `EXACT_OPTION` in its options, a session converts weights to uint8, whose kernels
add in 32 bits; the same operators run. Other processors ignore the option.
"""

import functools
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat.export.onnx.graph import Array
from qat.inputs import Inputs
from qat.kernels.cpu import processor
from qat.torch_internals import pytree

EXACT_OPTION = ("session.x64quantprecision", "1")
"""Name and value, for `onnxruntime.SessionOptions().add_session_config_entry`."""

CHANNELS = 64


def open_session(
    path: str | os.PathLike[str],
    optimize: bool = True,
    optimized: Path | None = None,
    exact: bool = True,
    threads: int = 0,
    content: bytes | None = None,
) -> Any:
    """Open a session on the CPU.

    Args:
        path: the file.
        optimize: with ONNX Runtime's default graph optimisation, or with none.
        optimized: where to write the optimised graph, if anywhere.
        exact: with exact integer products on every processor; false: as the runtime multiplies by default.
        threads: 0 for as many as the runtime takes.
        content: what to open in place of the file; the integers in a second file are that file's.

    Raises:
        ValueError: if ONNX Runtime cannot read the file.
        RuntimeError: if `exact`, and no session multiplies exactly on this processor.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(Path(path).parent))
    options.log_severity_level = 3  # it warns of every optimised graph that it saves
    if exact and needs_option():
        options.add_session_config_entry(*EXACT_OPTION)
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.data")
    model, providers = Path(path).read_bytes() if content is None else content, ["CPUExecutionProvider"]
    try:
        try:
            return ort.InferenceSession(model, options, providers=providers)
        except ort.capi.onnxruntime_pybind11_state.Fail as error:
            if "does not match y_zero_point type" not in str(error):
                raise
            # It moves signed grids through reshapes, loses their zero point of 0, and refuses its own graph. Products
            # behind a reshape are then of float inputs, which MatMulNBits rounds to 8 bits unless it is told not to.
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
            return ort.InferenceSession(
                model, options, providers=providers, disabled_optimizers=["QDQPropagationTransformer"]
            )
    except Exception as error:  # its many own types
        raise ValueError(f"ONNX Runtime does not read the file: {str(error).splitlines()[0]}") from error


def run_session(session: Any, inputs: Inputs, names: list[str] | None = None) -> list[Tensor]:
    """Run a session and return its outputs.

    Args:
        session: from `open_session`.
        inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments, as given to `export_onnx`.
        names: the outputs to return; None: all of the model's.

    Raises:
        ValueError: if the file has other inputs, or does not run with these.
    """
    feed = _feed(session, inputs)
    try:
        results = session.run(names, feed)
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in feed.items())
        raise ValueError(f"ONNX Runtime does not run the file with {shapes}: {str(error).splitlines()[0]}") from error
    return [torch.from_numpy(np.asarray(result)) for result in results]


def _feed(session: Any, inputs: Inputs) -> dict[str, Array]:
    names = [declared.name for declared in session.get_inputs()]
    if isinstance(inputs, Mapping) and set(names) <= set(inputs):
        values = [inputs[name] for name in names]
    else:
        values = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if len(values) != len(names):
        raise ValueError(f"the file has {len(names)} inputs ({', '.join(names)}), and {len(values)} tensors were given")
    arrays = (value.detach().cpu() for value in values)
    return {
        name: (array.float() if array.is_floating_point() else array).contiguous().numpy()
        for name, array in zip(names, arrays, strict=True)
    }


def default_is_exact() -> bool:
    """Return True if a session without options is exact here, or on QAT_PROCESSOR."""
    asked = processor.asked_for()
    return multiplies_exactly(with_option=False) if asked is None else asked == "vnni"


def needs_option() -> bool:
    """Return True if exact products need `EXACT_OPTION` on this processor.

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
    """Return True if a session multiplies extreme integers exactly, in four operators."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    if with_option:
        options.add_session_config_entry(*EXACT_OPTION)
    session = ort.InferenceSession(_extreme_products(), options, providers=["CPUExecutionProvider"])
    rows = np.full((8, CHANNELS), 255, np.uint8)
    images = np.full((1, CHANNELS, 8, 8), 255, np.uint8)
    one, many, dense, grouped = session.run(None, {"row": rows[:1], "rows": rows, "images": images})
    signs = np.where(np.arange(CHANNELS) % 2, -128, 127) * 255  # one product each; kernels add 9 in a window
    return bool(
        (one == CHANNELS * signs).all()
        and (many == CHANNELS * signs).all()
        and (dense == 9 * CHANNELS * signs[:, None, None]).all()
        and (grouped == 9 * signs[:, None, None]).all()
    )


def _extreme_products() -> bytes:
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
    return bytes(model.SerializeToString())
