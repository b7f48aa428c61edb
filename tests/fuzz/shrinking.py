"""`shrink`: makes a failing program shorter as long as it fails in the same way."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Program

MOST_CHECKS = 150


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Remove one part after another as long as the program still fails."""
    checks, found = 0, True
    while found and checks < MOST_CHECKS:
        found = False
        for smaller in _smaller(program):
            checks += 1
            if fails(smaller):
                program, found = smaller, True
                break
            if checks >= MOST_CHECKS:
                break
    return replace(program, modules=program.used())


def _smaller(program: Program) -> Iterator[Program]:
    for number in reversed(range(len(program.lines))):
        yield program.without_line(number)
    if "," in program.result:
        for result in program.result.split(", "):
            yield replace(program, result=result)
    for name in ("before", "after"):
        lines = getattr(program, name)
        for number in range(len(lines)):
            yield replace(program, **{name: lines[:number] + lines[number + 1 :]})
    x = re.sub(r"(rand\w*\(.*?\)).*", r"\1", program.x)
    plainer = {"recipe": "None", "context": "default", "needs_x": False, "x": x}
    for name, value in plainer.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})
