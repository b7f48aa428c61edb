"""What a rule takes besides the grid: `QuantSpec.options`, checked against the rule's own dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qat.text import check_types, did_you_mean


@dataclass(frozen=True)
class NoOptions:
    """The options of a rule that takes none."""


def read_options(rule: str, options_type: Any, given: Mapping[str, Any]) -> Any:
    """An instance of a rule's dataclass: fields with defaults and types; `__post_init__` may refuse by ValueError."""
    known = [option.name for option in fields(options_type)]
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known) or f"it takes {', '.join(known) or 'none'}"
            raise ValueError(f"rule {rule!r}: unknown option {name!r}; {hint}")
    check_types(options_type, given, f"rule {rule!r}")
    try:
        return options_type(**given)
    except ValueError as error:
        raise ValueError(f"rule {rule!r}: {error}") from error
