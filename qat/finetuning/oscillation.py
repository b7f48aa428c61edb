"""Weights that jump between two integers: counted, dampened, or frozen."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat.analysis.grid_weights import GridWeight, grid_weights
from qat.inputs import expect_model

OSCILLATES = 0.005  # frequency from which a weight counts as oscillating, as in the paper's tables
STATE = ("integer", "direction", "frequency", "average", "frozen")  # of each weight


class Count(NamedTuple):
    """Numbers of weights, of those that oscillate now, and of frozen ones."""

    weights: int
    oscillating: int
    frozen: int


class Oscillations:
    """Detect weights that oscillate, and stop them in two ways (arXiv:2203.11086).

    Near the edge between two integers the straight-through gradient pushes a weight back and forth for ever, so that
    the last weights and BatchNorm's statistics are partly chance, at few bits and in depthwise layers most.

    With q the integer of a weight after a step, d the direction of its last change (0 before the first), m `momentum`:

        oscillates = q changed against d
        frequency  = m * oscillates + (1 - m) * frequency
        average    = m * q + (1 - m) * average

    Freezing: a weight whose frequency exceeds a threshold gets the integer round(average), and is set to
    (integer - zero_point) * scale after this and every later step, whatever gradient, momentum and decay did to it.
    Dampening: `penalty` is strength * sum((target - clip(weight, low, high))^2), with target = (q - zero_point) * scale
    without gradient, and low and high the ends of the grid. Clipped weights are on target, so scales get no gradient.
    With s = (progress - after) / (1 - after), from `after` on:

        threshold = freeze + (freeze_from - freeze) * (1 + cos(pi * s)) / 2
        strength  = dampen * (1 - cos(pi * s)) / 2

    The values of Nagel et al. at 4 bits: freeze=0.01 from 0.1 (0.011 at 3 bits), or dampen=0.1. Both end about equally
    well there (MobileNetV2 W4A4: 70.6 and 70.5 %, 69.5 without). Averages of frozen weights are held by `EMA.hold`.

    The state is the training's, as an optimizer's is, and not in buffers of the model. Save `state_dict()` beside the
    optimizer's; a resumed run is then the uninterrupted one, bit by bit. Under torch.distributed it follows from the
    weights, so it is the same on every rank; weights that FSDP2 has sharded are left out.

    Memory: 14 bytes a weight. Time, as a share of a step of ResNet-20 W4A4 (128 images, 0.37 s on one thread of a busy
    Xeon): counting 1 %, counting and freezing 2.4 %, `penalty` with its backward another 3 %.

    Args:
        model: prepared and calibrated, on its device. Rules without fixed integers are left out, as are weights whose
            quantizer is switched off, for that time.
        dampen: lambda at the end of the training, at least 0.
        freeze, freeze_from: thresholds of the frequency at the end, above 0, and when freezing begins, at least that;
            None freezes nothing.
        after: share of the training without dampening or freezing, from 0 to below 1.
        momentum: m, above 0 and at most 1.
        most_bits: weights of wider grids are left out: a step crosses several of their integers, and to turn around is
            no jump between two. Of an 8-bit first layer 87 % would count, of all weights 14 % (ResNet-20 W3A4, digits).

    Attributes:
        weights: what is watched, by the name of its layer.
        left_out: the other quantized weights, and why, as the end of a sentence.

    >>> import qat
    >>> model = qat.prepare(nn.Sequential(nn.Linear(8, 4)), qat.QuantRecipe({"bits": 3}), torch.randn(2, 8))
    >>> qat.calibrate(model, [torch.randn(16, 8)])
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> oscillations = Oscillations(model, freeze=0.01)
    >>> for step in range(20):
    ...     loss = model(torch.randn(16, 8)).square().mean() + oscillations.penalty(step / 20)
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     oscillations.update(step / 20)
    >>> oscillations.count().weights
    32
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dampen: float = 0.0,
        freeze: float | None = None,
        freeze_from: float = 0.1,
        after: float = 0.25,
        momentum: float = 0.01,
        most_bits: int = 4,
    ) -> None:
        expect_model(Oscillations, model, locals())
        _check(dampen, freeze, freeze_from, after, momentum)
        self.dampen, self.freeze, self.freeze_from = dampen, freeze, freeze_from
        self.after, self.momentum = after, momentum
        self.weights, self.left_out = grid_weights(model, most_bits)
        if not self.weights:
            first = next((f"the weight of {name!r} {why}" for name, why in self.left_out.items()), "call prepare first")
            raise ValueError(f"Oscillations: the model has no weight on an integer grid of few bits: {first}")
        codes = [each.codes() for each in self.weights.values()]
        self._sizes, self._shapes = [each.numel() for each in codes], [each.shape for each in codes]
        # One vector for all layers: a step is then a few long operations, not a few short ones for each layer.
        self.integer = torch.cat([each.flatten().float() for each in codes])
        self.direction = torch.zeros_like(self.integer, dtype=torch.int8)
        self.frequency = torch.zeros_like(self.integer)
        self.average = self.integer.clone()
        self.frozen = torch.zeros_like(self.integer, dtype=torch.bool)
        self._holds = False  # True if a weight may be frozen; it saves a synchronisation with the device

    def penalty(self, progress: float) -> Tensor:
        """Return the dampening loss at this progress, 0 to 1; 0 before it begins."""
        share = _share(progress, self.after)
        strength = 0.0 if share is None else self.dampen * (1 - math.cos(math.pi * share)) / 2
        parts = [_distance(each) for each in self.weights.values() if strength and not each.quantizer.passes]
        return strength * torch.stack(parts).sum() if parts else torch.zeros((), device=self.integer.device)

    @torch.no_grad()
    def update(self, progress: float) -> None:
        """Note the weights after an optimizer's step at this progress, 0 to 1.

        Frozen ones are set to their integers again.
        """
        codes = self._codes()
        change = torch.sign(codes - self.integer).to(torch.int8)
        oscillates = change * self.direction < 0
        self.direction = torch.where(change == 0, self.direction, change)
        self.frequency.lerp_(oscillates.to(self.frequency.dtype), self.momentum)
        self.average.lerp_(codes, self.momentum)
        self.integer = codes
        share = _share(progress, self.after)
        if self.freeze is not None and share is not None:
            threshold = self.freeze + (self.freeze_from - self.freeze) * (1 + math.cos(math.pi * share)) / 2
            new = (self.frequency > threshold) & ~self.frozen
            # An average of integers of the grid needs no clamp.
            self.integer = torch.where(new, self.average.round(), self.integer)
            self.frozen |= new
            self._holds = True
        self.hold()

    def count(self) -> Count:
        """Return the sums of `by_layer`."""
        return Count(*map(sum, zip(*self.by_layer().values(), strict=True)))

    def by_layer(self) -> dict[str, Count]:
        """Return counts by layer name.

        A weight oscillates if its frequency is above 0.005 and it is not frozen.
        """
        flags = torch.stack(((self.frequency > OSCILLATES) & ~self.frozen, self.frozen))
        sums = torch.stack([part.sum(1) for part in flags.split_with_sizes(self._sizes, dim=1)])
        rows = sums.tolist()  # one device synchronisation
        return {name: Count(size, *row) for name, size, row in zip(self.weights, self._sizes, rows, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each weight, in vectors over all layers, and their sizes."""
        return {
            **{key: getattr(self, key) for key in STATE},
            "layers": dict(zip(self.weights, self._sizes, strict=True)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of a model with the same layers.

        The model holds the weights of that time already.
        """
        own = dict(zip(self.weights, self._sizes, strict=True))
        missing = sorted({"layers", *STATE} - state.keys())
        if missing:
            raise ValueError(f"Oscillations: the state has no {missing[0]!r}; give what state_dict() returned")
        if list(state["layers"].items()) != list(own.items()):
            different = sorted(dict(own.items() ^ state["layers"].items())) or ["the order of the layers"]
            raise ValueError(f"Oscillations: the state is of another model; they differ in {different[0]!r}")
        for key in STATE:
            getattr(self, key).copy_(state[key])
        self._holds = bool(self.frozen.any())  # waits for the device, once

    def _codes(self) -> Tensor:
        # Weights that are frozen or switched off have not moved.
        parts = [
            before if each.quantizer.passes else each.codes().flatten().to(before.dtype)
            for each, before in zip(self.weights.values(), self.integer.split_with_sizes(self._sizes), strict=True)
        ]
        codes = torch.cat(parts)
        return torch.where(self.frozen, self.integer, codes) if self._holds else codes

    @torch.no_grad()
    def hold(self) -> None:
        """Set the frozen weights to their integers, on the present scales."""
        if not self._holds:
            return
        integers, frozen = self.integer.split_with_sizes(self._sizes), self.frozen.split_with_sizes(self._sizes)
        for each, codes, held, shape in zip(self.weights.values(), integers, frozen, self._shapes, strict=True):
            if not each.quantizer.passes:  # switched off, the weight is float for a while
                rows = each.rows()
                values = each.values(codes.view(shape)).to(rows.dtype)
                each.write(torch.where(held.view(shape), values, rows))


def _distance(each: GridWeight) -> Tensor:
    rows = each.rows()
    (low, high), target = each.quantizer.bounds(), each.values(each.codes())
    ends = (each.values(torch.full_like(target, end)) for end in (low, high))
    return (torch.clamp(rows, *ends) - target).square().sum()


def _share(progress: float, after: float) -> float | None:
    if not 0 <= progress <= 1:
        raise ValueError(f"Oscillations: progress must be from 0 to 1, got {progress!r}")
    return None if progress < after else (progress - after) / (1 - after)


def _check(dampen: float, freeze: float | None, freeze_from: float, after: float, momentum: float) -> None:
    for name, value, inside, bounds in (
        ("dampen", dampen, 0 <= dampen < math.inf, "at least 0 and finite"),
        ("freeze", freeze, freeze is None or 0 < freeze <= 1, "above 0 and at most 1, or None"),
        ("freeze_from", freeze_from, freeze is None or freeze <= freeze_from <= 1, f"from freeze, {freeze!r}, to 1"),
        ("after", after, 0 <= after < 1, "from 0 to below 1"),
        ("momentum", momentum, 0 < momentum <= 1, "above 0 and at most 1"),
    ):
        if not inside:
            raise ValueError(f"Oscillations: {name} must be {bounds}, got {value!r}")
