"""`Axes`: how the axes of a torch tensor lie in a stored one, so that views and permutations move nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Axes:
    """A torch tensor in terms of the tensor that stores it.

    Args:
        sizes: of the stored axes, the last one changes fastest. No axis has length 1.
        dims: for every axis of the torch tensor, the stored axes that make it up, the last one changes fastest. An
            axis of length 1 has none.

    >>> images = Axes.stored((1, 8, 4, 5))  # NHWC in memory
    >>> images.sizes, images.dims
    ((4, 5, 8), ((), (2,), (0,), (1,)))
    """

    sizes: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    @classmethod
    def stored(cls, shape: Sequence[int]) -> "Axes":
        """A tensor in the layout of its number of axes."""
        return cls.plain(shape, layout(len(shape)))

    @classmethod
    def plain(cls, shape: Sequence[int], order: Sequence[int] | None = None) -> "Axes":
        """A tensor whose axes lie in this order; None: as in torch."""
        held = [axis for axis in order or range(len(shape)) if shape[axis] != 1]
        dims = tuple((held.index(axis),) if axis in held else () for axis in range(len(shape)))
        return cls(tuple(shape[axis] for axis in held), dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the torch tensor."""
        return tuple(math.prod(self.sizes[axis] for axis in dim) for dim in self.dims)

    def order(self, axes: Sequence[int]) -> list[int]:
        """The stored axes in the order of these torch axes; sorted if the tensor lies so in memory."""
        return [part for axis in axes for part in self.dims[axis]]

    def permuted(self, order: Sequence[int]) -> "Axes":
        """torch.permute."""
        return Axes(self.sizes, tuple(self.dims[axis] for axis in order))

    def viewed(self, shape: Sequence[int]) -> "Axes | None":
        """torch.reshape; None if an axis would have to be split where it has no whole parts."""
        parts = [[size] for size in self.sizes]
        waiting = [(axis, 0) for dim in self.dims for axis in dim]
        found: list[list[tuple[int, int]]] = []
        for wanted in shape:
            found.append([])
            while wanted > 1:
                axis, piece = waiting[0]
                size = parts[axis][piece]
                if wanted % size == 0:
                    del waiting[0]
                elif size % wanted == 0:
                    parts[axis][piece:] = [wanted, size // wanted]
                    waiting[0] = (axis, piece + 1)
                else:
                    return None
                found[-1].append((axis, piece))
                wanted //= parts[axis][piece]
        names = [(axis, piece) for axis, sizes in enumerate(parts) for piece in range(len(sizes))]
        return Axes(
            tuple(size for sizes in parts for size in sizes),
            tuple(tuple(names.index(name) for name in dim) for dim in found),
        )

    def transposition(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """The shape to see the stored tensor in, and the permutation that brings it in this order of stored axes."""
        breaks = [place for place in range(1, len(order)) if order[place] != order[place - 1] + 1]
        runs = [list(order[first:end]) for first, end in pairwise([0, *breaks, len(order)])]
        ranked = sorted(runs)
        return [math.prod(self.sizes[axis] for axis in run) for run in ranked], [ranked.index(run) for run in runs]


def layout(axes: int) -> tuple[int, ...]:
    """The torch axes of a tensor in the order in which a file stores them: images as NHWC, all else as torch does."""
    return (0, 2, 3, 1) if axes == 4 else tuple(range(axes))
