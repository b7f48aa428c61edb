"""AdaRound, BRECQ, QDrop: rounding so that layers or blocks answer as in float.

All three minimise, over the rounding of the weights of one layer or block at a time,

    channels * mean((f(x) - float f(x'))^2) / mean(float f(x')^2) + rounding_weight * sum(1 - |2 * h - 1|^beta)

with x the input as the grids before it make it, x' the input of the float model, and h of `SoftRounding`. The papers
have no denominator; with it a layer whose outputs are small, for want of a BatchNorm, learns as others do. The penalty
is left out of the first fifth of the steps; beta then falls from 20 to 2 as a half cosine. At the end the weights
themselves lie on the chosen levels: nothing else of the model changes, and training goes on from there.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qat.inputs import Batch
from qat.layers import QuantLayer
from qat.post_training.stretches import Stretch, stretches
from qat.quantizer import Quantizer
from qat.quantizer.granularity import from_groups, to_groups
from qat.switches import switched
from qat.text import check_types, some
from qat.torch_internals import pytree

T = TypeVar("T")

WARM_UP, BETAS = 0.2, (20.0, 2.0)
"""Share of the steps without penalty, and beta's first and last value: those of the papers' code."""

NOT_OWN = "since no graph calls them, once, with a weight of their own"

STRETCH = 0.1
"""The sigmoid is stretched by so much beyond 0 and 1 and clipped there, so that both are reached (zeta = 1.1,
gamma = -0.1 in the paper)."""


class SoftRounding(nn.Module):
    """A weight between the two levels around each of its elements.

        weight = scale * clamp(floor(w / scale) + h, qmin - zero_point, qmax - zero_point)
        h = clamp((1 + 2 * 0.1) * sigmoid(v) - 0.1, 0, 1)

    At first h is the rest of w / scale, and the weight is w, where the grid holds it; a penalty then draws h to 0 or 1.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", arXiv:2004.10568, eqs. 22-24.

    Args:
        layer: a quantized layer with its own weight, calibrated.
    """

    scale: Tensor
    floor: Tensor
    nearest: Tensor

    def __init__(self, layer: QuantLayer) -> None:
        super().__init__()
        self.layer = [layer]  # in a list: its parameters are not those of this module
        quantizer = layer.weight_quantizer
        rows = to_groups(layer.channels_first(layer.weight.detach()), quantizer.spec).float()
        scale, zero_point = (each.detach() for each in quantizer.grid(rows))
        self.low, self.high = (bound - zero_point for bound in quantizer.bounds())
        self.register_buffer("scale", scale)
        self.register_buffer("floor", torch.floor(rows / scale))
        self.register_buffer("nearest", quantizer.compute_codes(rows).detach() - zero_point)
        rest = rows / scale - self.floor  # h at first, of which v is the inverse
        self.v = nn.Parameter(-torch.log((1 + 2 * STRETCH) / (rest + STRETCH) - 1))

    @staticmethod
    def refusal(quantizer: Quantizer) -> str | None:
        """Return why weights cannot be rounded otherwise, as a sentence's end, or None."""
        own = type(quantizer).compute_codes is not Quantizer.compute_codes
        if own or not quantizer.uniform or not quantizer.exportable:
            return f"since the rule {quantizer.spec.rule!r} finds its integers in a way of its own"
        return "since its quantizer is switched off" if quantizer.passes else None

    def h(self) -> Tensor:
        """Return the place of each element between its two levels, 0 to 1."""
        return torch.clamp(torch.sigmoid(self.v) * (1 + 2 * STRETCH) - STRETCH, 0, 1)

    def forward(self) -> Tensor:
        """Return the weight, in torch's layout."""
        return self._weight(self.h())

    def _weight(self, h: Tensor) -> Tensor:
        layer = self.layer[0]
        levels = torch.clamp(self.floor + h, self.low, self.high)
        rows = from_groups(levels * self.scale, layer.weight_quantizer.spec)
        return layer.torch_layout(rows).to(layer.weight.dtype)

    def penalty(self, beta: float) -> Tensor:
        """Return sum(1 - |2 * h - 1|^beta), which is 0 if every h is 0 or 1."""
        return (1 - (2 * self.h() - 1).abs() ** beta).sum()

    @torch.no_grad()
    def write(self) -> int:
        """Set weights to the nearer of two levels; return how many leave the nearest one."""
        h = (self.h() > 0.5).float()
        self.layer[0].weight.copy_(self._weight(h))
        return int((torch.clamp(self.floor + h, self.low, self.high) != self.nearest).sum())


@dataclass(frozen=True)
class AdaRound:
    """Round the weights of each layer so that its output is that of the float layer.

    Args:
        iterations: steps of Adam for each layer or block; the papers take 10,000 to 20,000.
        lr: Adam's rate for v, from which h follows.
        rounding_weight: of the penalty that draws h to 0 or 1.
        batch_size: images in a step.
        drop: the probability with which an element of an activation stays as it is in float, drawn in each step.
        scale_lr: Adam's rate for the scales of the activations between layers; 0: they stay.
        seed: of all that is drawn.

    Cost: about `iterations` training steps of the model on `batch_size` images. Memory: the activations between two
    layers, for all images, twice.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", arXiv:2004.10568. The layer's
    output is compared before its activation.

    >>> import qat
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 2)), qat.QuantRecipe({"bits": 3}), torch.randn(2, 8))
    >>> qat.calibrate(model, torch.randn(64, 8), steps=[AdaRound(iterations=50)])
    """

    iterations: int = 500
    lr: float = 0.01
    rounding_weight: float = 0.01
    batch_size: int = 32
    drop: float = 0.0
    scale_lr: float = 0.0
    seed: int = 0

    before_ranges: ClassVar[bool] = False

    def __post_init__(self) -> None:
        kind = type(self).__name__
        check_types(type(self), vars(self))
        if self.iterations < 1 or self.batch_size < 1:
            raise ValueError(f"{kind}: iterations and batch_size must be at least 1, got {self}")
        if not (self.lr > 0 and self.rounding_weight > 0 and self.scale_lr >= 0 and 0 <= self.drop <= 1):
            raise ValueError(
                f"{kind}: lr and rounding_weight must be above 0, scale_lr at least 0, drop from 0 to 1, got {self}"
            )

    def run(self, model: nn.Module, original: nn.Module, batches: Iterable[Batch]) -> str:
        """Round the weights of a calibrated model; return what was done, in a sentence."""
        changed, weights, done = 0, 0, set[nn.Module]()
        generator = torch.Generator().manual_seed(self.seed)
        for stretch in stretches(model, original, batches, self.batch_size):
            for unit in self._units(stretch):
                layers = unit.layers()
                done.update(layers.values())
                soft = {f"{name}.weight": SoftRounding(layer) for name, layer in layers.items()
                        if SoftRounding.refusal(layer.weight_quantizer) is None}  # fmt: skip
                if soft:
                    self._fit(unit, soft, generator)
                    changed += sum(each.write() for each in soft.values())
                    weights += sum(each.v.numel() for each in soft.values())
        share = f"{100 * changed / max(weights, 1):.1f} % of {weights:,} weights are not rounded to the nearest level"
        return f"{share}{_left_out(model, done)}"

    def _units(self, stretch: Stretch) -> Iterable[Stretch]:
        return stretch.one_by_one()

    def _fit(self, unit: Stretch, soft: dict[str, SoftRounding], generator: torch.Generator) -> None:
        module, targets = unit.module(), unit.targets()
        if not (found := _floating(targets)):
            return  # classes have no gradient
        power = sum(float(t.double().square().sum()) for t in found) / max(sum(t.numel() for t in found), 1)
        power = max(power, torch.finfo(torch.float32).tiny)
        scales = [each for each in module.modules() if isinstance(each, Quantizer) and each.role == "activation"]
        learned = [each for scale in scales for each in scale.parameters() if self.scale_lr and each.requires_grad]
        groups = [([each.v for each in soft.values()], self.lr), (learned, self.scale_lr)]
        optimizer = torch.optim.Adam([{"params": params, "lr": lr} for params, lr in groups if params])
        parameters = [each for params, _ in groups for each in params]
        inside = [each.layer[0].weight_quantizer for each in soft.values()]
        mixed = partial(_mixed, self.drop, generator)
        with ExitStack() as undo, torch.enable_grad():
            undo.enter_context(switched(inside, True))
            for scale in scales if self.drop else ():
                undo.enter_context(scale.register_forward_hook(lambda _, args, y: mixed(args[0], y)))
            for step in range(self.iterations):
                chosen = int(torch.randint(len(targets), (), generator=generator))
                values = unit.on_grids[chosen]
                if self.drop:
                    values = pytree.tree_map(mixed, unit.in_float[chosen], values)
                answer = functional_call(module, {name: each() for name, each in soft.items()}, values)
                loss = _distance(answer, targets[chosen]) / power
                if (beta := _beta(step / self.iterations)) is not None:
                    loss = loss + self.rounding_weight * sum(each.penalty(beta) for each in soft.values())
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)  # the model's own get none
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
        optimizer.zero_grad()  # the scales belong to the model


@dataclass(frozen=True)
class BRECQ(AdaRound):
    """Round the weights of a block together, so that it answers as the float block.

    A block is the smallest stretch of the graph that begins and ends with one tensor: a residual block, or one layer of
    a chain. `AdaRound` has the arguments and the cost.

    Source: Li et al., "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction",
    arXiv:2102.05426. Errors of all outputs count alike, as in the authors' code, and not by the Fisher information.

    >>> BRECQ().drop
    0.0
    """

    def _units(self, stretch: Stretch) -> Iterable[Stretch]:
        return [stretch]


@dataclass(frozen=True)
class QDrop(BRECQ):
    """BRECQ with a random half of the activations in float, and scales that learn.

    It is for activations of few bits: the rounding of weights then holds for what the calibration images do not show.
    `AdaRound` has the arguments and the cost.

    Source: Wei et al., "QDrop: Randomly Dropping Quantization for Extremely Low-bit Post-Training Quantization",
    arXiv:2203.05740.

    >>> QDrop(iterations=500).drop
    0.5
    """

    drop: float = 0.5
    scale_lr: float = 4e-5


def _distance(answers: object, targets: object) -> Tensor:
    # channels * mean((y - t)^2), the sum of all outputs; channels are axis 1 of images, else the last.
    total = torch.zeros(())
    for y, t in zip(_floating(answers), _floating(targets), strict=True):
        total = total.to(y.device) + (y - t).square().mean() * y.shape[1 if y.dim() > 3 else -1]
    return total


def _floating(values: object) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]


def _beta(progress: float) -> float | None:
    # The exponent of the penalty; None while there is no penalty.
    if progress < WARM_UP:
        return None
    first, last = BETAS
    return last + 0.5 * (first - last) * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


def _mixed(drop: float, generator: torch.Generator, x: Tensor, y: T) -> T | Tensor:
    # y with a random share of its elements from x; what is no floating tensor stays.
    if not isinstance(y, Tensor) or not y.is_floating_point():
        return y
    return torch.where(torch.rand(y.shape, generator=generator).to(y.device) < drop, x, y)


def _left_out(model: nn.Module, done: set[nn.Module]) -> str:
    # The sentence on weights that keep rounding to nearest.
    reasons: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLayer):
            found = SoftRounding.refusal(module.weight_quantizer) if module in done else NOT_OWN
            if found:
                reasons.setdefault(found, []).append(name)
    return "".join(f"; rounded to nearest, {reason}: {some(names)}" for reason, names in reasons.items())
