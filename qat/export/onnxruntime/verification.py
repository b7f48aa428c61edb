"""`verify_onnx` and `compare_layers`: a file in ONNX Runtime against its model."""

import os
import re
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat.contexts import evaluating, in_full_precision
from qat.export.agreement import MIN_AGREEMENT, Verification, answers, close_predictions, output_tensors, verdict_on
from qat.export.checks import check_finite
from qat.export.onnxruntime.session import open_session, run_session
from qat.inputs import Batch, Inputs, as_batches, call_model, check_model, described, does_not_run, run_batch
from qat.integers.evaluation import evaluation_copy, quantizer_calls
from qat.integers.following import NEAR_TIE, ROUNDING, Follower, LayerDifference, no_quantizer
from qat.quantizer import Quantizer

FLOAT_CONVOLUTIONS = ("Conv", "FusedConv", "ConvTranspose")
"""Operators with which ONNX Runtime computes convolutions in float; QLinearConv is the one of integers."""

NUMBER = re.compile(r"\.\d+$")
"""The end of the name of a quantizer's further calls."""


@in_full_precision
def verify_onnx(
    path: str | os.PathLike[str],
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    default_session: bool = False,
    classes: bool = True,
) -> Verification:
    """Run the file in ONNX Runtime over batches, and compare it with the model.

    Args:
        path: the exported file.
        model: the model that it came from; it runs in evaluation mode and gets its train and eval flags back.
        batches: as for `calibrate`; labels that are a tensor of classes give `torch_top1` and `onnx_top1`.
        default_session: multiply as a session without options does, which is not exact on x86 without VNNI; false:
            multiply exactly on every processor.
        classes: axis 1 of outputs holds classes, where there is one; false: every value is a prediction, as of boxes.

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
    return verdict_on(pairs, sum(operators[name] for name in FLOAT_CONVOLUTIONS), classes)


@in_full_precision
def compare_layers(
    path: str | os.PathLike[str],
    model: nn.Module,
    inputs: Inputs,
    optimize: bool = True,
    *,
    default_session: bool = False,
) -> list[LayerDifference]:
    """Compare every quantizer's integers in ONNX Runtime and torch, layer by layer.

    ONNX Runtime's integers are read at every quantizer. The torch model then computes each next quantizer's integers
    from them, so that a difference is the layer's own and does not come from an earlier one. Reading may keep the
    runtime from fusing operators: if it answers otherwise unread, the last difference says where (`fused`).

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
    comparison = LayerComparison(path, model, optimize, default_session=default_session)
    found, answers = comparison.follow(inputs)
    return [*found, *comparison.fused(inputs, [read for _, read in answers])]


class LayerComparison:
    """A file whose session also returns every quantizer's integers, and its model.

    The arguments are those of `compare_layers`.
    """

    def __init__(
        self, path: str | os.PathLike[str], model: nn.Module, optimize: bool = True, *, default_session: bool = False
    ) -> None:
        import onnx

        self.file, self.model = Path(path).name, evaluation_copy(model, fold_quantizers=True)
        self.calls = quantizer_calls(self.model)
        self.proto = onnx.load(path, load_external_data=False)
        produced = [output for node in self.proto.graph.node for output in node.output]
        self.names = [name for name in produced if name in self.calls or NUMBER.sub("", name) in self.calls]
        self.missing = [name for known in self.calls.values() for name in known if name not in self.names]
        self.outputs = [output.name for output in self.proto.graph.output]
        self.open = partial(open_session, path, optimize=optimize, exact=not default_session)
        self.session, _ = self.reading(())

    def reading(self, unread: Collection[str]) -> tuple[Any, list[str]]:
        """Open a session that also returns the integers of all but these quantizers."""
        left_out = {name for path in unread for name in self.calls[path]}
        names, given = [name for name in self.names if name not in left_out], self.proto.graph.output
        del given[len(self.outputs) :]  # those of the last call
        given.extend(type(given[0])(name=name) for name in names if name not in self.outputs)
        return self.open(content=self.proto.SerializeToString()), names

    def follow(
        self, inputs: Inputs, unread: Collection[str] = ()
    ) -> tuple[list[LayerDifference], list[tuple[Tensor, Tensor]]]:
        """Compare the integers of all quantizers but these, and the outputs (`Follow`)."""
        session, names = self.reading(unread) if unread else (self.session, self.names)
        try:
            results = run_session(session, inputs, [*self.outputs, *names])
        except ValueError as error:
            raise no_quantizer(self.file, self.missing[0]) if self.missing else error from None
        theirs, integers = results[: len(self.outputs)], results[len(self.outputs) :]
        calls = {path: self.calls[path] for path in self.calls if path not in unread}  # torch has its own for others
        follower = Follower(calls, dict(zip(names, integers, strict=True)), self.file)
        with follower.following(self.model), torch.no_grad():
            found = run_batch("compare_layers", self.model, inputs)
        ours = [x.float() for x in output_tensors(found)]
        if [tuple(x.shape) for x in ours] != [tuple(x.shape) for x in theirs]:
            raise ValueError(
                f"compare_layers: the outputs of {self.file} have other shapes than the model's; was it made from it?"
            )
        return follower.differences, [(a, b.float()) for a, b in zip(ours, theirs, strict=True)]

    def fused(self, inputs: Inputs, read: list[Tensor]) -> list[LayerDifference]:
        """Find layers that differ while no integers are read from the answers `read`."""

        def differ(unread: Collection[str]) -> bool:
            return any(map(_beyond_rounding, read, run_session(self.reading(unread)[0], inputs, self.outputs)))

        found, left = list[str](), list(self.calls) if differ(self.calls) else []
        # Each round finds the last quantizer that has to stay unread for the difference to show.
        while left and not (found and differ(found)):
            last = bisect_left(range(len(left)), True, key=lambda n: differ([*found, *left[: n + 1]]))
            found, left = [left[last], *found], left[:last]
        layers, answers = self.follow(inputs, found) if found else ([], [])
        for name, (ours, theirs) in zip(self.outputs, answers, strict=False):
            quantizer = self.model.get_submodule(found[-1])
            assert isinstance(quantizer, Quantizer)
            off = _beyond_rounding(ours, theirs)
            levels = ((ours - theirs).abs() / quantizer.grid()[0]).nan_to_num().ceil()
            layers.append(LayerDifference(name, ours.numel(), off, int(levels.amax() if off else 0), off))
        return [replace(each, fused=tuple(found)) for each in layers if each.beyond_ties > NEAR_TIE * each.elements][:1]


def check_other_sizes(model: nn.Module, file: bytes, larger: Callable[[int, int], Inputs]) -> None:
    """Compare a traced file with its model on inputs higher and wider by some pixels."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder, "free.onnx")
        path.write_bytes(file)
        comparison = LayerComparison(path, model, optimize=False)
        for height, width in ((32, 64), (64, 32), (37, 19)):
            inputs = larger(height, width)
            try:
                call_model(comparison.model, inputs)
            except Exception as error:  # of the user's own code
                if height % 2:  # many models take no odd sizes
                    break
                raise does_not_run("export_onnx: dynamic", model, described(inputs), error) from error
            found, answers = comparison.follow(inputs)
            off = any(each.beyond_ties > NEAR_TIE * each.elements for each in found)
            if off or any(close_predictions([both]).float().mean() < MIN_AGREEMENT for both in answers):
                raise ValueError(
                    f"export_onnx: dynamic: with {described(inputs)} the file answers otherwise than the model"
                )


def _beyond_rounding(ours: Tensor, theirs: Tensor) -> int:
    most = float(ours.abs().nan_to_num(0, 0, 0).max()) if ours.numel() else 0.0
    return int((~torch.isclose(ours, theirs.float(), rtol=0, atol=ROUNDING * most, equal_nan=True)).sum())


def optimized_operators(path: str | os.PathLike[str], *, exact: bool = True) -> Counter[str]:
    """Count the operators that run after ONNX Runtime's default optimisation, by type.

    On x86 without VNNI, a default session and an exact one run the same operators with different kernels.
    """
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        open_session(path, optimized=optimized, exact=exact)
        graph = onnx.load(optimized, load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)
