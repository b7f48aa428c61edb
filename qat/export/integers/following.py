"""A model run along the integers of another runtime, so that each layer is compared on the same input integers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qat.export.integers.frozen import stored_offset
from qat.quantizer import Quantizer


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


class Follower(fx.Interpreter):
    """Runs a model, continuing at every quantizer with the integers that the other runtime computed there.

    Args:
        model: from `evaluation_graph`.
        names: of its quantizer calls.
        integers: of the other runtime, as stored, by the names of the calls. A format may merge equal calls: of
            these one is enough.
        file: where they come from, for errors.

    Attributes:
        differences: of every call, after `run`.
    """

    def __init__(
        self, model: fx.GraphModule, names: dict[fx.Node, str], integers: dict[str, Tensor], file: str
    ) -> None:
        super().__init__(model)
        self.names, self.integers, self.file = names, integers, file
        self.differences: list[LayerDifference] = []
        self._followed: list[tuple[Quantizer, Tensor, Tensor]] = []

    def run_node(self, n: fx.Node) -> Any:
        """The node's value; for a quantizer from the other runtime's integers.

        Raises:
            ValueError: if that runtime has no integers for a quantizer.
        """
        if n not in self.names:
            return super().run_node(n)
        quantizer = self.fetch_attr(str(n.target))
        (x,), _ = self.fetch_args_kwargs_from_env(n)
        theirs = self._theirs(self.names[n], quantizer, x) - stored_offset(quantizer)
        gap = (quantizer.codes(x) - theirs).abs()
        gap = gap.nan_to_num(nan=float(quantizer.span()))  # a NaN of torch equals no integer
        self.differences.append(
            LayerDifference(self.names[n], gap.numel(), int((gap > 0).sum()), int(gap.max()) if gap.numel() else 0)
        )
        scale, zero_point = quantizer.grid()
        return (theirs - zero_point) * scale

    def _theirs(self, name: str, quantizer: Quantizer, x: Tensor) -> Tensor:
        """The other runtime's integers for a call, or for the equal call that it was merged with."""
        integers = self.integers.get(name)
        if integers is None:
            equal = [found for other, read, found in self._followed if _is_same_call(other, read, quantizer, x)]
            if not equal:
                raise no_quantizer(self.file, name)
            integers = equal[0]
        if len(self.integers) < len(self.names):
            self._followed.append((quantizer, x, integers))
        return integers.float()


def no_quantizer(file: str, name: str) -> ValueError:
    """The error of a file that lacks a quantizer."""
    return ValueError(f"compare_layers: {file} has no quantizer {name!r}; was it made from this model?")


def _is_same_call(quantizer: Quantizer, x: Tensor, other: Quantizer, y: Tensor) -> bool:
    same_grid = all(torch.equal(a, b) for a, b in zip(quantizer.grid(), other.grid(), strict=True))
    return same_grid and quantizer.bounds() == other.bounds() and torch.equal(x, y)
