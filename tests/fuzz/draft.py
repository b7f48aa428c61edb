"""`Draft`: a growing program. Each line runs as it is added, which gives the shapes and rejects invalid lines."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.program import namespace

Move = Callable[["Draft", str], None]
"""Adds a few lines that read the named variable."""

LARGEST = 6000
"""The most elements of a variable."""


class Unfit(Exception):  # noqa: N818
    """The move does not fit the variable."""


class Draft:
    """A program's modules and lines, and the values of its variables.

    Attributes:
        rng: the only source of randomness.
        modules, lines: those of the program.
        values: the tensor of each variable.
    """

    def __init__(self, rng: random.Random, x: Tensor, other: Tensor | None = None) -> None:
        self.rng, self.other = rng, other
        self.modules: dict[str, str] = {}
        self.lines: list[str] = []
        self.values: dict[str, Tensor] = {"v0": x.detach().clone()}
        self.parts = nn.Module()
        self.counts = {"v": 0, "m": 0}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a variable."""
        return tuple(self.values[name].shape)

    def pick(self, choices: Sequence[Any]) -> Any:
        """A random choice."""
        return self.rng.choice(choices)

    def chance(self, share: float) -> bool:
        """True with this probability."""
        return self.rng.random() < share

    def module(self, made: str, shared: float = 0.2) -> str:
        """The name of a submodule made by this expression: a new one, or with probability `shared` an existing one."""
        same = [name for name, other in self.modules.items() if other == made]
        if same and self.chance(shared):
            return f"self.{self.pick(same)}"
        name = f"m{self.counts['m']}"
        self.counts["m"] += 1
        module = eval(made, namespace())
        if hasattr(self.parts, name):
            delattr(self.parts, name)  # left by a move that was undone
        if isinstance(module, Tensor):
            self.parts.register_buffer(name, module)
        else:
            setattr(self.parts, name, module)
        self.modules[name] = made
        return f"self.{name}"

    def let(self, value: str) -> str:
        """Assign the expression to a new variable and return its name."""
        name = f"v{self.counts['v'] + 1}"
        self.do(f"{name} = {value}")
        self.counts["v"] += 1
        return name

    def write(self, forms: Sequence[str], **operands: str) -> str:
        """Assign one of these expressions, with its operands put in, to a new variable and return its name."""
        return self.let(self.pick(forms).format(**operands))

    def call(self, made: str, x: str, shared: float = 0.2) -> str:
        """Assign what a submodule makes of x to a new variable and return its name; the others are as for `module`."""
        return self.let(f"{self.module(made, shared)}({x})")

    @property
    def last(self) -> str:
        """The newest variable."""
        return list(self.values)[-1]

    def several(self, value: str, count: int) -> list[str]:
        """Assign the items of a tuple to new variables and return their names."""
        names = [f"v{self.counts['v'] + 1 + number}" for number in range(count)]
        self.do(f"{', '.join(names)} = {value}")
        self.counts["v"] += count
        return names

    def do(self, line: str) -> None:
        """Run a line and keep it."""
        space: dict[str, Any] = {**namespace(), "self": self.parts, "other": self.other, **self.values}
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
        """Make a move; if it does not fit, undo it and return False."""
        kept = (dict(self.modules), list(self.lines), dict(self.values), dict(self.counts))
        try:
            move(self, x)
        except Unfit:
            self.modules, self.lines, self.values, self.counts = kept
            return False
        return True

    def others(self, x: str, same: bool = True) -> list[str]:
        """Variables with the shape of x, or all variables; x is included."""
        return [name for name, value in self.values.items() if not same or value.shape == self.values[x].shape]
