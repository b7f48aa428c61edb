"""`verify_onnx` and `compare_layers`: an exported file in ONNX Runtime against its torch model."""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat.contexts import evaluating
from qat.export.agreement import Pair, Verification, judge
from qat.export.checks import check_finite
from qat.export.onnxruntime.session import open_session, output_tensors, run_session
from qat.inputs import Batch, as_batches, check_model, inputs_and_labels, run_batch
from qat.integers.evaluation import evaluation_copy, quantizer_calls
from qat.integers.following import Follower, LayerDifference, no_quantizer

FLOAT_CONVOLUTIONS = ("Conv", "FusedConv", "ConvTranspose")
"""What ONNX Runtime computes convolutions in float with; integer ones are QLinearConv."""

NUMBER = re.compile(r"\.\d+$")
"""The end of the name of a quantizer's further calls."""


def verify_onnx(
    path: str | os.PathLike[str], model: torch.nn.Module, batches: Iterable[Batch], *, default_session: bool = False
) -> Verification:
    """Run the file in ONNX Runtime over the batches and compare its answers with the model's.

    Args:
        path: the exported file.
        model: the model that it came from; it runs in evaluation mode and gets its train and eval flags back.
        batches: as for `calibrate`; labels that are a tensor of classes give `torch_top1` and `onnx_top1`.
        default_session: multiply as a session without options does, which is not exact on x86 without VNNI; false:
            multiply exactly on every processor.

    Raises:
        TypeError: if the path is not a path, the model no module, or a batch none.
        ValueError: if there is no batch, if the model does not run with one, if no output holds a value, or if the file
            has other inputs or outputs than the model.
        FileNotFoundError: if there is no such file.
    """
    given = as_batches(verify_onnx, model, batches)
    check_finite(model, "verify_onnx")
    run = partial(run_session, open_session(path, exact=not default_session))
    with evaluating(model), torch.no_grad():
        pairs = [answers("verify_onnx", run, model, batch)[1] for batch in given]
    operators = optimized_operators(path, exact=not default_session)
    return judge(pairs, sum(operators[name] for name in FLOAT_CONVOLUTIONS))


def answers(caller: str, run: Callable[[Any], list[Tensor]], model: torch.nn.Module, batch: Batch) -> tuple[Any, Pair]:
    """The inputs of a batch; and the model's outputs, those that `run` gives, and the labels, if they are classes."""
    inputs, labels = inputs_and_labels(caller, batch)
    expected = output_tensors(run_batch(caller, model, inputs))
    return inputs, (expected, run(inputs), labels if isinstance(labels, Tensor) else None)


def compare_layers(
    path: str | os.PathLike[str],
    model: torch.nn.Module,
    inputs: Any,
    optimize: bool = True,
    *,
    default_session: bool = False,
) -> list[LayerDifference]:
    """Compare every quantizer's integers between ONNX Runtime and torch, each layer given the same input integers.

    ONNX Runtime's integers are read at every quantizer. The torch model then computes each next quantizer's integers
    from them, so that a difference is the layer's own and does not come from an earlier one.

    Args:
        path: the exported file.
        model: the model that it came from: prepared, or a module with prepared parts and quantized layers. A copy of it
            runs on the CPU, in float32 and evaluation mode.
        inputs: one batch: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        optimize: with ONNX Runtime's default graph optimisation (integer kernels), or with none.
        default_session: as for `verify_onnx`.

    Raises:
        ValueError: if the file's quantizers are not the model's.
    """
    check_model(compare_layers, model)
    return LayerComparison(path, model, optimize, default_session=default_session).follow(inputs)[0]


class LayerComparison:
    """A file in a session that also gives the integers of every quantizer, and a copy of the model that follows them.

    The arguments are those of `compare_layers`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module,
        optimize: bool = True,
        *,
        default_session: bool = False,
    ) -> None:
        import onnx

        self.file, self.model = Path(path).name, evaluation_copy(model, fold_quantizers=True)
        self.calls = quantizer_calls(self.model)
        proto = onnx.load(path, load_external_data=False)
        produced = [output for node in proto.graph.node for output in node.output]
        self.names = [name for name in produced if name in self.calls or NUMBER.sub("", name) in self.calls]
        self.missing = [name for known in self.calls.values() for name in known if name not in self.names]
        self.outputs = [output.name for output in proto.graph.output]
        more = [name for name in self.names if name not in self.outputs]
        proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in more)
        content = proto.SerializeToString()
        self.session = open_session(path, optimize=optimize, exact=not default_session, content=content)

    def follow(self, inputs: Any) -> tuple[list[LayerDifference], list[tuple[Tensor, Tensor]]]:
        """`compare_layers`, and every output twice: by torch from ONNX Runtime's last integers, and by the latter."""
        try:
            results = run_session(self.session, inputs, [*self.outputs, *self.names])
        except ValueError as error:
            raise no_quantizer(self.file, self.missing[0]) if self.missing else error from None
        theirs, integers = results[: len(self.outputs)], results[len(self.outputs) :]
        follower = Follower(self.calls, dict(zip(self.names, integers, strict=True)), self.file)
        with follower.following(self.model), torch.no_grad():
            found = run_batch("compare_layers", self.model, inputs)
        ours = [x.float() for x in output_tensors(found)]
        if [tuple(x.shape) for x in ours] != [tuple(x.shape) for x in theirs]:
            raise ValueError(
                f"compare_layers: the outputs of {self.file} have other shapes than the model's; was it made from it?"
            )
        return follower.differences, [(a, b.float()) for a, b in zip(ours, theirs, strict=True)]


def optimized_operators(path: str | os.PathLike[str], *, exact: bool = True) -> Counter[str]:
    """Operator types and their counts after ONNX Runtime's default optimisation: the operators that really run.

    On x86 without VNNI, a default session and an exact one run the same operators with different kernels.
    """
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        open_session(path, optimized=optimized, exact=exact)
        graph = onnx.load(optimized, load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)
