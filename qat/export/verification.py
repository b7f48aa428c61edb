"""`verify_onnx`: run an exported file in ONNX Runtime and hold it against the torch model, layer by layer if asked."""

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qat.evaluating import evaluating
from qat.preparation.nodes import model_device, submodule_of
from qat.quantizer import Quantizer

Batches = Iterable[Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class Verification:
    """How an ONNX file answers, next to the torch model.

    Attributes:
        samples: how many were compared.
        agreement: share of equal predictions (arg max), 0 to 1; an answer with NaN or infinity equals none.
        torch_top1, onnx_top1: percent correct; None if the batches brought no labels.
        max_difference: largest absolute difference of an output.
    """

    samples: int
    agreement: float
    torch_top1: float | None
    onnx_top1: float | None
    max_difference: float


@dataclass(frozen=True)
class LayerDifference:
    """One quantizer's integers in ONNX Runtime and in torch, computed from the same input integers.

    Attributes:
        name: the quantizer.
        elements: integers compared.
        differing: how many are not equal.
        largest: largest difference, in levels.
    """

    name: str
    elements: int
    differing: int
    largest: int


def verify_onnx(path: str | os.PathLike[str], model: torch.nn.Module, batches: Batches) -> Verification:
    """Run the file in ONNX Runtime over the batches and compare its answers with the model's.

    Args:
        path: the exported file.
        model: the model that it came from; run in evaluation mode, its flags are restored.
        batches: tensors, or (images, labels) pairs.

    Raises:
        ValueError: if there is no batch.
        FileNotFoundError: if there is no such file.
    """
    session = _session(Path(path).read_bytes())
    feed = session.get_inputs()[0].name
    device = model_device(model)
    answers: list[tuple[Tensor, Tensor, Tensor | None]] = []
    with evaluating(model), torch.no_grad():
        for batch in batches:
            images, labels = (batch, None) if isinstance(batch, Tensor) else (batch[0], batch[1])
            expected = model(images.to(device)).float().cpu()
            got = session.run(None, {feed: images.float().cpu().contiguous().numpy()})[0]
            answers.append((expected, torch.from_numpy(got), labels))
    return _judge(answers)


def _judge(answers: list[tuple[Tensor, Tensor, Tensor | None]]) -> Verification:
    if not answers:
        raise ValueError("verify_onnx: batches is empty; at least one batch is needed to compare anything")
    expected, got = torch.cat([a[0] for a in answers]), torch.cat([a[1] for a in answers])
    labels = [a[2] for a in answers if a[2] is not None]
    ours, theirs = expected.argmax(1), got.argmax(1)

    def top1(predictions: Tensor) -> float | None:
        return 100.0 * (predictions == torch.cat(labels)).double().mean().item() if labels else None

    return Verification(
        samples=len(ours),
        agreement=((ours == theirs) & expected.isfinite().all(1) & got.isfinite().all(1)).double().mean().item(),
        torch_top1=top1(ours),
        onnx_top1=top1(theirs),
        max_difference=(expected - got).abs().max().item(),
    )


def compare_layers(
    path: str | os.PathLike[str], model: fx.GraphModule, images: Tensor, optimize: bool = True
) -> list[LayerDifference]:
    """Compare every quantizer's integers between ONNX Runtime and torch, each layer given the same input integers.

    ONNX Runtime's integers are read at every quantizer. The torch model then computes each next quantizer's integers
    from them, so that a difference is the layer's own and does not come from an earlier one.

    Args:
        path: the exported file.
        model: the prepared model that it came from.
        images: one batch.
        optimize: with ONNX Runtime's default graph optimisation (integer kernels), or with none.

    Raises:
        ValueError: if the file's quantizers are not the model's.
    """
    names = [str(node.target) for node in model.graph.nodes if isinstance(submodule_of(model, node), Quantizer)]
    integers = _runtime_integers(path, names, images, optimize)
    device = model_device(model)
    follower = _Follower(model, {name: torch.from_numpy(a).to(device) for name, a in integers.items()})
    with evaluating(model), torch.no_grad():
        follower.run(images.to(device))
    return follower.differences


def optimized_operators(path: str | os.PathLike[str]) -> Counter[str]:
    """Operator types and their counts after ONNX Runtime's default optimisation: what really runs."""
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        _session(Path(path).read_bytes(), optimized=optimized)
        graph = onnx.load(optimized).graph
    return Counter(node.op_type for node in graph.node)


class _Follower(fx.Interpreter):
    """Runs a prepared model, continuing at every quantizer with the integers that the other runtime got there."""

    def __init__(self, model: fx.GraphModule, integers: dict[str, Tensor]) -> None:
        super().__init__(model)
        self.integers = integers
        self.differences: list[LayerDifference] = []

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        quantizer = self.fetch_attr(target)
        if not isinstance(quantizer, Quantizer):
            return super().call_module(target, args, kwargs)
        theirs = self.integers[str(target)].float()
        gap = (quantizer.codes(args[0]) - theirs).abs()
        self.differences.append(
            LayerDifference(str(target), gap.numel(), int((gap > 0).sum()), int(gap.max()) if gap.numel() else 0)
        )
        scale, zero_point = quantizer.grid()
        return (theirs - zero_point) * scale


def _runtime_integers(
    path: str | os.PathLike[str], names: list[str], images: Tensor, optimize: bool
) -> dict[str, np.ndarray[Any, Any]]:
    import onnx

    proto = onnx.load(path)
    produced = {output for node in proto.graph.node for output in node.output}
    missing = [name for name in names if name not in produced]
    if missing:
        raise ValueError(
            f"compare_layers: {Path(path).name} has no quantizer {missing[0]!r}; was it made from this model?"
        )
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    session = _session(proto.SerializeToString(), optimize=optimize)
    results = session.run(names, {session.get_inputs()[0].name: images.float().cpu().contiguous().numpy()})
    return dict(zip(names, results, strict=True))


def _session(model: bytes, optimize: bool = True, optimized: Path | None = None) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3  # its warnings about saved optimised graphs are not the user's concern
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
