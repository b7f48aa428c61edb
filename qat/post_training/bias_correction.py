"""`BiasCorrection`: what quantization adds to the mean of each channel is taken away again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qat.inputs import Batch
from qat.layers import QuantLayer
from qat.post_training.stretches import Stretch, norm_of, stretches
from qat.text import some
from qat.torch_internals import AnyBatchNorm


@dataclass(frozen=True)
class BiasCorrection:
    """Correct the mean of each layer's channels, in the order in which layers run.

        error = mean(layer(x)) - mean(float layer(x'))    for each output channel
        bias <- bias - error;    with a BatchNorm behind: running_mean <- running_mean + error

    x is the input as the grids before it make it, x' that of the float model; both means are over images and pixels.
    Layers without a bias and without a BatchNorm with running statistics behind them are named, and stay. So do layers
    that are called twice, since one bias serves both calls.

    Args:
        batch_size: images that flow together.

    Cost: two evaluations of the batches, a layer at a time.

    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721,
    section 4.2, and appendix D for the empirical means.

    >>> import qat
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), qat.QuantRecipe({"bits": 3}))
    >>> qat.calibrate(model, torch.randn(64, 8), steps=[BiasCorrection()])
    """

    batch_size: int = 32

    before_ranges: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"BiasCorrection: batch_size must be at least 1, got {self.batch_size}")

    @torch.no_grad()
    def run(self, model: nn.Module, original: nn.Module, batches: Iterable[Batch]) -> str:
        """Correct the layers of a calibrated model; return what was done, in a sentence."""
        done = set[nn.Module]()
        for stretch in stretches(model, original, batches, self.batch_size):
            for name, unit in stretch.one_by_one():
                layer: Any = unit.graph.get_submodule(name)
                if _correct(layer, norm_of(unit.graph, unit.end), _error(layer, unit)):
                    done.add(layer)
        left = [name for name, each in model.named_modules() if isinstance(each, QuantLayer) and each not in done]
        without = f"; without a bias or running statistics of their own: {some(left)}" if left else ""
        return f"{len(done)} layers{without}"


def _error(layer: QuantLayer, unit: Stretch) -> Tensor:
    """What the layer's outputs have more than the float layer's, on the mean of each channel."""
    results, targets = unit.results(), unit.targets()
    sums = [_sums(layer, y) - _sums(layer, target) for y, target in zip(results, targets, strict=True)]
    total = torch.stack(sums).sum(0)
    count = sum(target.numel() for target in targets) / len(total)
    mean: Tensor = total / count
    return mean


def _sums(layer: QuantLayer, y: Tensor) -> Tensor:
    """The sum over everything but channels, which are so many axes from the end as the layer's bias has."""
    axis = y.dim() - layer.per_channel(layer.weight.new_zeros(0), layer.weight).dim()
    total: Tensor = y.double().sum([each for each in range(y.dim()) if each != axis])
    return total


def _correct(layer: Any, norm: Any, error: Tensor) -> bool:
    """Take the error of a layer, or of a layer and its norm, away; return whether there is something that can."""
    if norm is not None:
        if not isinstance(norm, AnyBatchNorm) or norm.running_mean is None or norm.running_var is None:
            return False
        gain = torch.rsqrt(norm.running_var.double() + norm.eps)
        if norm.weight is not None:
            gain = gain * norm.weight.double()
        norm.running_mean += torch.where(gain == 0, 0, error / gain).to(norm.running_mean.dtype)
        return True
    if getattr(layer, "bias", None) is None:
        return False
    layer.bias -= error.to(layer.bias.dtype)
    return True
