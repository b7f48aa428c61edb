"""What a rule takes besides the grid: `QuantSpec.options`, checked against the rule's own dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from qat.text import did_you_mean


@dataclass(frozen=True)
class NoOptions:
    """The options of a rule that takes none."""


def read_options(rule: str, options_type: Any, given: Mapping[str, Any]) -> Any:
    """The options of a rule, its defaults filled in.

    The fields of `options_type` are the options, with a default each, whose type the value must have. A field that is a
    Literal takes only its values; `__post_init__` may raise ValueError for other limits.
    """
    known = {option.name: option.default for option in fields(options_type)}
    hints = get_type_hints(options_type)
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(str(name), known) or f"it takes {', '.join(known) or 'none'}"
            raise ValueError(f"rule {rule!r}: unknown option {name!r}; {hint}")
        expected = type(known[name])
        fits = isinstance(value, (int, float)) if expected is float else isinstance(value, expected)
        if not fits or (isinstance(value, bool) and expected is not bool):
            kind = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}[expected]
            raise ValueError(f"rule {rule!r}: option {name!r} must be {kind}, got {value!r}")
        choices = get_args(hints[name])
        if choices and value not in choices:
            raise ValueError(f"rule {rule!r}: option {name!r} must be one of {', '.join(choices)}, got {value!r}")
    try:
        return options_type(**given)
    except ValueError as error:
        raise ValueError(f"rule {rule!r}: {error}") from error
