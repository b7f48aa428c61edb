"""An ONNX Runtime session: how it is opened, and run."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat.export.onnxruntime.default_session import EXACT_OPTION, needs_option
from qat.torch_internals import pytree


def open_session(
    path: str | os.PathLike[str],
    optimize: bool = True,
    optimized: Path | None = None,
    exact: bool = True,
    threads: int = 0,
    content: bytes | None = None,
) -> Any:
    """A session on the CPU.

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


def run_session(session: Any, inputs: Any, names: list[str] | None = None) -> list[Tensor]:
    """The outputs of a session.

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


def output_tensors(answer: Any) -> list[Tensor]:
    """The tensors of a torch model's answer, in the order of the file's outputs."""
    return [leaf.cpu() for leaf in pytree.tree_leaves(answer) if isinstance(leaf, Tensor)]


def _feed(session: Any, inputs: Any) -> dict[str, Any]:
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
