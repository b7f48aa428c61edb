"""`Verdict`: the result of a self-check."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The result of a self-check."""

    distrusted: tuple[str, ...] | None = ()  # modules that do not train on codes; None: the whole model trains plainly
    reason: str = ""  # the first difference

    def __str__(self) -> str:
        if self.distrusted is None:
            return f"trains operation by operation: {self.reason}"
        if self.distrusted:
            return f"trains on codes but for {', '.join(self.distrusted)}: {self.reason}"
        return "trains on codes, the fast way; a step was compared with plain training and is the same"


def is_wanted() -> bool:
    """Return True if models are checked; QAT_SELF_CHECK=off trusts them."""
    return os.environ.get("QAT_SELF_CHECK", "").lower() != "off"
