"""`CrossLayerEqualization`: channels of like ranges between two layers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeGuard

import torch
from torch import Tensor, fx, nn

from qat.graph.nodes import is_call
from qat.graph.operations import calls_where
from qat.inputs import Batch
from qat.layers import QuantLayer
from qat.post_training.stretches import called, norm_of, owns_weight, used_once
from qat.preparation.prepared_graph import PreparedGraph
from qat.preparation.proof import traced_parts
from qat.quantizer import Quantizer
from qat.text import check_types
from qat.torch_internals import AnyBatchNorm, AnyConvolution

HOMOGENEOUS = calls_where(lambda row: row.homogeneous)

DEAD = 1e-6
"""Share of the largest range below which a channel is left as it is."""

Norm: TypeAlias = Any
"""A BatchNorm with statistics and an affine part, whose tensors torch's types call optional."""

Pair: TypeAlias = tuple[QuantLayer, Norm | None, QuantLayer]
"""Two layers that follow each other, and between them the BatchNorm of the first if it has one."""


@dataclass(frozen=True)
class CrossLayerEqualization:
    """Give channels between two layers like ranges; the float model stays the same.

        s = sqrt(r1 / r2);    W1[i], b1[i] <- W1[i] / s[i], b1[i] / s[i];    W2[:, i] <- W2[:, i] * s[i]

    r1[i] is the largest |W1[i]|, r2[i] the largest |W2[:, i]|, b1 the bias; s is not so small that one would grow
    beyond max(|b1| + 3 * norm(W1[i])), about the range of the activation. Pairs are layers with nothing but ReLU and a
    quantizer in between, whose result nothing else reads. ReLU6, a norm that is not folded, or a frozen range let no
    factor pass; the pairs that they keep apart are counted. All ranges are found behind it.

    A BatchNorm behind W1 takes any factor exactly, and the grid holds W1 before it is folded. So such a W1 gets one
    range, in a pair or not, with t = r1 / max(r1): W1, b1, mean, var <- W1 / t, b1 / t, mean / t, var / t^2, and gamma
    what eps leaves; and gamma and beta take s = max(r2) / r2, which evens W2.

    It is for weights with one scale per tensor. Those with a scale per channel gain only on the side of W2, and of the
    activations between.

    Args:
        rounds: passes over all pairs, since a layer may be in two of them.

    Cost: none to speak of.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721,
    section 4.1.

    >>> import qat
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), None, torch.randn(2, 8))
    >>> qat.calibrate(model, torch.randn(64, 8), steps=[CrossLayerEqualization()])
    """

    rounds: int = 10

    before_ranges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        if self.rounds < 1:
            raise ValueError(f"CrossLayerEqualization: rounds must be at least 1, got {self.rounds}")

    @torch.no_grad()
    def run(self, model: nn.Module, original: nn.Module, batches: Iterable[Batch]) -> str:
        """Equalize the layers of a prepared model; return what was done, in a sentence."""
        found = [pair for graph in traced_parts(model).values() for pair in _pairs(graph)]
        pairs = [pair for pair, passes in found if passes]
        normed = [each for graph in traced_parts(model).values() for each in _normed(graph).items()]
        for _ in range(self.rounds):
            for pair in pairs:
                _equalize(*pair)
            for layer, norm in normed:
                if not layer.weight_quantizer.is_frozen:
                    _even_rows(layer, norm)
        kept = f"; {len(found) - len(pairs)} pairs have something between them that lets no factor pass"
        done = f"{len(normed)} weights in front of a BatchNorm, {len(pairs)} pairs of layers"
        return f"{done}{kept if len(found) > len(pairs) else ''}"


def _pairs(graph: PreparedGraph) -> Iterator[tuple[Pair, bool]]:
    # With True if a factor passes between the two layers.
    once, norms = used_once(graph), _normed(graph)
    for node in graph.graph.nodes:
        second = called(graph, node)
        if not _is_pairable(second) or second not in once:
            continue
        passes, before = True, node.args[0]
        while not _is_pairable(first := called(graph, before)) and isinstance(before, fx.Node):
            if not (before.op.startswith("call_") and len(before.all_input_nodes) == len(before.users) == 1):
                break
            kept = isinstance(first, Quantizer) and not first.is_frozen
            passes = passes and (kept or is_call(before, *HOMOGENEOUS, graph))
            before = before.args[0]
        if _is_pairable(first) and first in once and len(before.users) == 1:
            norm = norm_of(graph, before)
            if norm in (None, norms.get(first)):
                # Channels are the last axis for a linear layer, and the axis before those of its window for others.
                inputs = second.in_channels if isinstance(second, AnyConvolution) else second.in_features
                alike = first.weight.dim() == second.weight.dim() and len(_outputs(first)) == inputs
                frozen = first.weight_quantizer.is_frozen or second.weight_quantizer.is_frozen
                yield (first, norm, second), passes and alike and not frozen


def _normed(graph: PreparedGraph) -> dict[QuantLayer, Norm]:
    # Layers to the BatchNorm that can take a factor of each of their channels.
    once, pairs = used_once(graph), [(called(graph, node), norm_of(graph, node)) for node in graph.graph.nodes]
    return {
        layer: norm for layer, norm in pairs
        if owns_weight(layer) and {layer, norm} <= once and isinstance(norm, AnyBatchNorm) and norm.affine
    }  # fmt: skip


def _is_pairable(module: nn.Module | None) -> TypeGuard[QuantLayer]:
    # A layer whose input channels are an axis of its weight, or a depthwise one.
    if not owns_weight(module) or module.input_quantizer is not None:
        return False
    if _is_grouped(module):
        return bool(module.groups == module.in_channels == module.out_channels)
    return isinstance(module, (nn.Linear, AnyConvolution))


def _outputs(layer: QuantLayer) -> Tensor:  # the weight with a row for each output channel
    return layer.channels_first(layer.weight).flatten(1)


def _is_grouped(layer: QuantLayer) -> bool:
    return isinstance(layer, AnyConvolution) and layer.groups > 1


def _even_rows(layer: QuantLayer, norm: Norm) -> None:
    r = _outputs(layer).abs().amax(1)
    t = torch.where(r > DEAD * r.max(), r / r.max(), 1.0)
    layer.weight /= layer.torch_layout(t.view(-1, *[1] * (layer.weight.dim() - 1)))
    norm.weight *= t / torch.sqrt(norm.running_var + norm.eps)
    for scaled in (norm.running_mean, layer.bias):
        if scaled is not None:
            scaled /= t
    norm.running_var /= t.square()
    norm.weight *= torch.sqrt(norm.running_var + norm.eps)


def _equalize(first: QuantLayer, norm: Norm | None, second: QuantLayer) -> None:
    rows = second.channels_first(second.weight)
    columns = rows if _is_grouped(second) else rows.transpose(0, 1)
    r1, r2 = _outputs(first).abs().amax(1), columns.flatten(1).abs().amax(1)
    # A dead channel has no range to even.
    alive = (r1 > DEAD * r1.max()) & (r2 > DEAD * r2.max())
    s = torch.where(alive, torch.sqrt(r1 / r2) if norm is None else r2.max() / r2, 1.0)
    if norm is None and first.bias is not None:  # a bias that grows would widen the activation's range
        bias = first.bias.abs()
        reach = (bias + 3 * _outputs(first).norm(dim=1)).max()
        s = s.maximum(bias / reach.clamp_min(torch.finfo(bias.dtype).tiny))
    for scaled in (norm.weight, norm.bias) if norm is not None else (first.weight, first.bias):
        if scaled is not None:
            scaled /= s if scaled.dim() == 1 else first.torch_layout(s.view(-1, *[1] * (scaled.dim() - 1)))
    columns *= s.view(-1, *[1] * (columns.dim() - 1))
