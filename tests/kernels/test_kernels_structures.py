"""What Python says of the C functions is what the C sources say: every function, argument and field."""

import ctypes
import re
from typing import Any

import pytest

from qat.kernels.cpu import compiler, structures
from qat.kernels.cpu.structures import DOUBLE, FLOAT, INT, POINTER, SIZE

SOURCE = "\n".join(path.read_text() for path in (*compiler.HEADERS, *compiler.SOURCES))

STRUCTURES: dict[str, Any] = {
    name: kind
    for name, kind in vars(structures).items()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure)
}
"""They have the same names in C."""

NUMBERS: dict[str, Any] = {"i64": SIZE, "int": INT, "float": FLOAT, "double": DOUBLE}


def kind_of(declaration: str) -> Any:
    """Of 'const float *restrict x' and the like."""
    if "*" in declaration:
        return POINTER
    name = declaration.replace("const ", "").split()[0]
    return NUMBERS.get(name) or STRUCTURES[name]


def functions() -> dict[str, tuple[str, list[str]]]:
    """Name to what it returns and its arguments, of all that other files can see."""
    found = re.findall(r"^(void|int|double|float) (\w+)\(([^)]*)\) \{", SOURCE, re.MULTILINE)
    return {name: (returned, [each.strip() for each in given.split(",")]) for returned, name, given in found}


def test_every_function_is_declared() -> None:
    assert functions().keys() == structures.SIGNATURES.keys()


@pytest.mark.parametrize("name", structures.SIGNATURES)
def test_a_functions_arguments(name: str) -> None:
    returned, given = functions()[name]
    assert tuple(map(kind_of, given)) == structures.SIGNATURES[name]
    assert structures.RESULTS.get(name) is (None if returned == "void" else NUMBERS[returned])


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structures_fields(name: str) -> None:
    (body,) = re.findall(r"typedef struct \{([^}]*)\} " + name + ";", SOURCE)
    fields = []
    for line in re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL).split(";"):
        if line.strip():
            first, *others = line.replace("const ", "").strip().split(",")
            kind, start = first.split(maxsplit=1)
            fields += [(each.strip().lstrip("*"), kind_of(f"{kind} {each}")) for each in (start, *others)]
    assert fields == STRUCTURES[name]._fields_
