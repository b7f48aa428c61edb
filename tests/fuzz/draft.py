"""`Draft`: a program while it grows; every line is run at once, so that shapes are known and nonsense is left out."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.program import namespace

Move = Callable[["Draft", str], None]
"""What adds a few lines that read a variable."""

LARGEST = 6000
"""Elements of a variable."""


class Unfit(Exception):  # noqa: N818
    """A move that this variable does not allow."""


class Draft:
    """A program's modules and lines, and what the variables hold.

    Attributes:
        rng: all chance.
        modules, lines: of the program.
        values: variables and their tensors.
    """

    def __init__(self, rng: random.Random, x: Tensor) -> None:
        self.rng = rng
        self.modules: dict[str, str] = {}
        self.lines: list[str] = []
        self.values: dict[str, Tensor] = {"v0": x.detach().clone()}
        self.parts = nn.Module()
        self.counts = {"v": 0, "m": 0}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a variable."""
        return tuple(self.values[name].shape)

    def pick(self, choices: Sequence[Any]) -> Any:
        """One of them."""
        return self.rng.choice(choices)

    def chance(self, share: float) -> bool:
        """True that often."""
        return self.rng.random() < share

    def module(self, made: str, shared: float = 0.2) -> str:
        """The name of a submodule made like that, sometimes of one that is there already."""
        same = [name for name, other in self.modules.items() if other == made]
        if same and self.chance(shared):
            return f"self.{self.pick(same)}"
        name = f"m{self.counts['m']}"
        self.counts["m"] += 1
        module = eval(made, namespace())
        if hasattr(self.parts, name):
            delattr(self.parts, name)  # of a move that was taken back
        if isinstance(module, Tensor):
            self.parts.register_buffer(name, module)
        else:
            setattr(self.parts, name, module)
        self.modules[name] = made
        return f"self.{name}"

    def let(self, value: str) -> str:
        """Give an expression's value a name."""
        name = f"v{self.counts['v'] + 1}"
        self.do(f"{name} = {value}")
        self.counts["v"] += 1
        return name

    def several(self, value: str, count: int) -> list[str]:
        """Give names to the items of a tuple."""
        names = [f"v{self.counts['v'] + 1 + number}" for number in range(count)]
        self.do(f"{', '.join(names)} = {value}")
        self.counts["v"] += count
        return names

    def do(self, line: str) -> None:
        """Run a line and keep it."""
        space: dict[str, Any] = {**namespace(), "self": self.parts, **self.values}
        try:
            with torch.no_grad():
                exec(line, space)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise Unfit(line) from error
        found = {name: value for name, value in space.items() if name[0] == "v" and name[1:].isdigit()}
        if any(not isinstance(value, Tensor) or not 0 < value.numel() <= LARGEST for value in found.values()):
            raise Unfit(line)
        self.values = found
        self.lines.append(line)

    def attempt(self, move: Move, x: str) -> bool:
        """Make a move, or leave everything as it was."""
        kept = (dict(self.modules), list(self.lines), dict(self.values), dict(self.counts))
        try:
            move(self, x)
        except Unfit:
            self.modules, self.lines, self.values, self.counts = kept
            return False
        return True

    def others(self, x: str, same: bool = True) -> list[str]:
        """Variables of x's shape, or of any, itself included."""
        return [name for name, value in self.values.items() if not same or value.shape == self.values[x].shape]
