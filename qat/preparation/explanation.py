"""How the parts of a prepared model train, and why."""

from dataclasses import dataclass
from typing import NamedTuple

PLAINLY = "operation by operation"


class Trains(NamedTuple):
    """How a layer, a quantizer or a product trains.

    Attributes:
        kind: its class, or "matmul".
        how: "on codes" and its variants, or `PLAINLY`.
        why: the reason if it is not the fastest way; else empty.
    """

    kind: str
    how: str
    why: str = ""


@dataclass(frozen=True)
class Explanation:
    """How a traced part of a model trains.

    Attributes:
        how: of the whole part, in a sentence without its subject.
        rows: what runs in it, by name, in the order of the graph; None if `how` says all.
    """

    how: str
    rows: dict[str, Trains] | None = None
