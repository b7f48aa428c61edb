"""What every section of a config is made of: strict classes, and numbers within their range."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MOST, LEAST = 10**9, 1e-30
"""Beyond what a key can mean, other libraries fail with errors of their own."""


def meant(number: float) -> float:
    """The number, if a key can mean it."""
    if number > MOST or 0 < number < LEAST:
        raise ValueError(f"expected {f'at most {MOST:,}' if number > MOST else f'0 or at least {LEAST:g}'}")
    return number


Positive = Annotated[float, Field(gt=0), AfterValidator(meant)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(meant)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1), AfterValidator(meant)]
CountOrZero = Annotated[int, Field(ge=0), AfterValidator(meant)]
Bits = Annotated[int, Field(ge=1, le=16)]


class Section(BaseModel):
    """A section of the file: strict about keys, immutable after it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
