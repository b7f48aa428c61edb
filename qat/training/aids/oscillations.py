"""The `oscillation` block of a stage, as the aid that the trainer calls, and what it says and draws."""

from torch import nn

from qat.finetuning import Oscillations
from qat.training.config.stages import QATStageConfig, StageConfig
from qat.training.errors import value_errors_reported
from qat.training.run.logging import RunLog

MANY = 0.03
"""From this share of oscillating weights on, the line of an epoch says so."""


def build_oscillations(model: nn.Module, stage: StageConfig) -> Oscillations | None:
    """What counts, dampens or freezes the oscillating weights of a stage; None if its config does not ask for it.

    Raises:
        UserError: if no weight of the model lies on an integer grid.
    """
    wanted = stage.oscillation if isinstance(stage, QATStageConfig) else None
    if wanted is None:
        return None
    with value_errors_reported("qat.oscillation: "):
        return Oscillations(model, **wanted.model_dump())


def left_out_in_words(oscillations: Oscillations) -> str:
    """Which quantized weights are not watched, and why; "" if all are."""
    left = oscillations.left_out
    if not left:
        return ""
    named = "; ".join(f"that of {name!r} {why}" for name, why in list(left.items())[:3])
    more = f"; and {len(left) - 3} more" if len(left) > 3 else ""
    return f"qat.oscillation leaves out {len(left)} of {len(left) + len(oscillations.weights)} weights: {named}{more}"


def report_oscillations(oscillations: Oscillations, log: RunLog, stage: str, step: int) -> str:
    """Draw the shares of oscillating and of frozen weights, in percent; return a note for the epoch's line."""
    layers = oscillations.by_layer()
    for name, (weights, oscillating, _) in layers.items():
        log.scalar(f"oscillating/{name}", 100 * oscillating / weights, step)
    weights, oscillating, frozen = oscillations.count()
    log.scalar(f"{stage}/oscillating", 100 * oscillating / weights, step)
    notes = []
    if oscillations.freeze is not None:
        log.scalar(f"{stage}/frozen_weights", 100 * frozen / weights, step)
        notes.append(f"{100 * frozen / weights:.1f} % of the weights are frozen" if frozen else "")
    if oscillating > MANY * weights:
        name, worst = max(layers.items(), key=lambda item: item[1].oscillating / item[1].weights)
        free = oscillations.freeze is None and not oscillations.dampen
        notes.append(
            f"{100 * oscillating / weights:.1f} % of the weights oscillate, most in {name!r},"
            f" {100 * worst.oscillating / worst.weights:.1f} %"
            + (": qat.oscillation.freeze=0.01 or dampen=0.1 may help" if free else "")
        )
    return "; ".join(note for note in notes if note)
