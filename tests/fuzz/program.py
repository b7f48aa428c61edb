"""`Program`: a random model and the changes made to it, as lines of Python that can be run, printed and removed."""

import re
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat import QuantRecipe, QuantSpec
from tests.fuzz.own import OwnConv2d

VARIABLE = re.compile(r"\bv\d+\b")
MODULE = re.compile(r"\bm\d+\b")

HEADER = """\
import threading

import torch
import torch.nn.functional as F
from torch import nn

import qat
from qat import QuantRecipe, QuantSpec
from tests.fuzz.own import OwnConv2d
from tests.fuzz.steps import integers_however_small

"""

CONTEXTS = {
    "default": "torch.enable_grad()",
    "float_products": "qat.kernels.float_products()",
    "small_integers": "integers_however_small()",
    "device": 'torch.device("cpu")',
}
"""How training on codes runs: as on this machine, or as on another processor or device."""


@dataclass(frozen=True)
class Program:
    """A model as lines of code, and how it is trained.

    Attributes:
        seed: seed of parameters and data.
        x: the input; an expression.
        other: a second input, which lines call `other`; "" for none.
        modules: names of submodules and the expressions that make them.
        lines: the body of forward, which starts from `v0`.
        result: what forward returns.
        before: lines about `model`, the float one, before it is prepared.
        after: lines about `model`, the prepared one, run after its first step.
        recipe: an expression.
        context: one of `CONTEXTS`.
        needs_x: whether the input requires a gradient.
    """

    seed: int
    x: str
    modules: dict[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    result: str = "v0"
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    recipe: str = "None"
    context: str = "default"
    needs_x: bool = False
    other: str = ""

    def source(self) -> str:
        """The source of the model's class."""
        begin = ["super().__init__()", *(f"self.{name} = {made}" for name, made in self.used().items())]
        forward = [*self.lines, f"return {self.result}"]
        head = ["class Model(nn.Module):", "    def __init__(self):", *(f"        {line}" for line in begin), ""]
        given = "self, v0, other" if self.other else "self, v0"
        return "\n".join([*head, f"    def forward({given}):", *(f"        {line}" for line in forward)])

    def used(self) -> dict[str, str]:
        """The modules that a line uses."""
        named = set(MODULE.findall("\n".join(self.lines)))
        return {name: made for name, made in self.modules.items() if name in named}

    def script(self) -> str:
        """A script that runs the program and compares its results."""
        given = "x.clone(), other" if self.other else "x.clone()"
        steps = [f"model({given})"] if self.after else []
        return "\n".join(
            [
                f"# seed {self.seed}",
                HEADER,
                self.source(),
                "",
                "seen = []" if "seen" in "".join(self.after) else "",
                f"torch.manual_seed({self.seed})",
                "model = Model()",
                *self.before,
                f"x = {self.x}" + (".requires_grad_()" if self.needs_x else ""),
                *([f"other = {self.other}"] if self.other else []),
                f"model = qat.prepare(model, {self.recipe}, example_inputs={'(x, other)' if self.other else 'x'})",
                f"qat.calibrate(model, [{'((x, other),)' if self.other else 'x'}])",
                *steps,
                *self.after,
                f"with {CONTEXTS[self.context]}:",
                f"    found = model({given})",
                "with qat.kernels.plain_formulas():",
                f"    torch.testing.assert_close(found, model({given}), rtol=1e-2, atol=1e-2)",
            ]
        ).replace("\n\n\n", "\n\n")

    def build(self) -> nn.Module:
        """The float model."""
        space = namespace()
        torch.manual_seed(self.seed)
        exec(compile(self.source(), "<fuzz>", "exec"), space)
        space["model"] = space["Model"]()
        run(self.before, space)
        model: nn.Module = space["model"]
        return model

    def draw(self, attempt: int = 0) -> tuple[Tensor, ...]:
        """The inputs; each attempt gives others."""
        torch.manual_seed(self.seed * 1009 + attempt)
        x: Tensor = eval(self.x, namespace())
        others = (eval(self.other, namespace()),) if self.other else ()
        return x.requires_grad_() if self.needs_x else x, *others

    def change(self, model: nn.Module) -> list[float]:
        """Run the lines of `after`; the list that is returned will collect what hooks see."""
        space: dict[str, Any] = {**namespace(), "model": model, "seen": []}
        torch.manual_seed(self.seed + 1)
        run(self.after, space)
        seen: list[float] = space["seen"]
        return seen

    def without_line(self, number: int) -> "Program":
        """The program without one of its lines; readers of its result read the line's first operand instead."""
        target, lines, result = self.lines[number], self.lines[:number], self.result
        rest = self.lines[number + 1 :]
        defined = re.match(r"((?:v\d+(?:, )?)+) = (.*)", target)
        if defined is not None:
            source = next(iter(VARIABLE.findall(defined[2])), "v0")
            for name in defined[1].split(", "):
                rest = tuple(re.sub(rf"\b{name}\b", source, line) for line in rest)
                result = re.sub(rf"\b{name}\b", source, result)
        return replace(self, lines=(*lines, *rest), result=result)


def namespace() -> dict[str, Any]:
    """The names that the lines may use."""
    own = {"OwnConv2d": OwnConv2d, "threading": threading}
    return {"torch": torch, "nn": nn, "F": F, "qat": qat, "QuantRecipe": QuantRecipe, "QuantSpec": QuantSpec, **own}


def run(lines: tuple[str, ...], space: dict[str, Any]) -> None:
    """Run lines one by one."""
    for line in lines:
        exec(line, space)
