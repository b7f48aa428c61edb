"""Programs on which results once differed now agree, in integer and in float products."""

import dataclasses

import pytest

from tests.fuzz.cases import CASES
from tests.fuzz.checking import Verdict, check
from tests.fuzz.program import Program

EVERYWHERE = [
    (f"{name} ({context})", dataclasses.replace(program, context=context))
    for name, program in CASES.items()
    for context in {"default": 0, "small_integers": 0, program.context: 0}
]


@pytest.mark.parametrize("program", [program for _, program in EVERYWHERE], ids=[name for name, _ in EVERYWHERE])
def test_all_ways_agree(program: Program) -> None:
    assert check(program) == Verdict("agrees"), program.script()
