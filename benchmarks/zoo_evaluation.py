"""What users do first with a prepared model: evaluate other batches and sizes without gradients, copy it, store it.

Every answer is compared with that of plain evaluation with gradients; integer evaluation promises it to the bit, but
for float operations behind the last integers (docs/reliability.md).
"""

import copy
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from qat.contexts import evaluating
from qat.inputs import Inputs, call_model, copied

LARGEST_GAP = 1e-5
"""How far an answer may be off, as a share of its largest value."""

PICKLE = "a pickle"

MORE = 32
"""Pixels by which another size is larger; every network here halves at most five times."""


def batches_of(inputs: Inputs) -> dict[str, Inputs]:
    """The batch, another one, a larger one, another size."""
    other = tree_map_only(Tensor, _like, inputs)
    return {
        "the batch": inputs,
        "another batch": other,
        "a larger batch": tree_map(_longer, inputs, other, is_leaf=lambda node: isinstance(node, list)),
        "another size": tree_map_only(Tensor, _wider, inputs),
    }


def refusals(model: nn.Module, inputs: Inputs) -> dict[str, str]:
    """The batches that a float model refuses, and to be pickled, with its sentences."""
    refused: dict[str, str] = {}
    for name, batch in batches_of(inputs).items():
        try:
            with torch.no_grad():
                answers(model, batch)
        except Exception as error:
            refused[name] = _sentence(error)
    try:
        with open(os.devnull, "wb") as nowhere:
            torch.save(model, nowhere)
    except Exception as error:
        refused[PICKLE] = _sentence(error)
    return refused


def evaluation(model: nn.Module, inputs: Inputs, refused_in_float: Collection[str] = ()) -> dict[str, Any]:
    """Answers without gradients against those with them, for every batch.

    A batch that the model refuses is named in `refused`, with the sentence; a fault if the float model takes it.
    """
    gaps: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, batch in batches_of(inputs).items():
        try:
            with torch.enable_grad():
                expected = answers(model, batch)
        except Exception as error:
            refused[name] = _sentence(error)
            continue
        with torch.no_grad():
            gaps[name] = _gap(expected, answers(model, batch))
    wrong = {name: f"off by {gap:.2g} of the largest value" for name, gap in gaps.items() if not gap <= LARGEST_GAP}
    wrong |= {name: f"refused: {why}" for name, why in refused.items() if name not in refused_in_float}
    facts = {"gaps": gaps, "refused": refused, "ok": not wrong}
    return facts | ({"reason": ": ".join(next(iter(wrong.items())))} if wrong else {})


def copies(model: nn.Module, inputs: Inputs, fresh: Path, refused_in_float: Collection[str] = ()) -> dict[str, Any]:
    """The answers of a copy, a pickle, and a model that was pickled before calibration and takes the state dict."""
    expected = answers(model, inputs)
    with torch.no_grad():
        gaps = {"a copy": _gap(expected, answers(copy.deepcopy(model), inputs))}
    if PICKLE in refused_in_float:
        return {"gaps": gaps, "ok": gaps["a copy"] <= LARGEST_GAP}
    stored = fresh.with_name("stored.pt")
    torch.save(model, stored)
    gaps[PICKLE] = _gap(expected, answers(torch.load(stored, weights_only=False), inputs))
    again: nn.Module = torch.load(fresh, weights_only=False)
    again.load_state_dict(model.state_dict())
    with evaluating(again):
        gaps["a state dict"] = _gap(expected, answers(again, inputs))
    wrong = [name for name, gap in gaps.items() if not gap <= LARGEST_GAP]
    return {"gaps": gaps, "ok": not wrong} | ({"reason": f"{wrong[0]} answers otherwise"} if wrong else {})


def result_of(model: nn.Module, inputs: Inputs) -> str:
    """The type of the model's result, with gradients: what `evaluation` finds without them is its own matter."""
    return type(call_model(model, copied(inputs))).__name__


def answers(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The tensors of the answer to copies of the inputs: a model may write into what it is given."""
    answer = call_model(model, copied(inputs))
    return [leaf.detach() for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)]


def _sentence(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]


def _gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference as a share of the answer's largest value; infinite for other shapes, or NaN in one."""
    if [one.shape for one in ours] != [other.shape for other in theirs]:
        return float("inf")
    gaps = [0.0]
    for one, other in zip(ours, theirs, strict=True):
        if not torch.equal(one, other):
            one, other = one.double(), other.double()
            off, size = (one - other).abs().max(), one.abs().max()
            gaps.append(float("inf") if not off.isfinite() else float(off / size.clamp(min=1e-30)))
    return max(gaps)


def _like(x: Tensor) -> Tensor:
    """Other values of the same kind."""
    return x.flip(-1) * 0.7 + 0.1 if x.is_floating_point() else x.flip(-1)


def _longer(one: Any, other: Any) -> Any:
    """An argument of both batches as one: along the first axis, or as one list."""
    return [*one, *other] if isinstance(one, list) else torch.cat([one, other])


def _wider(x: Tensor) -> Tensor:
    """Images and clips that are higher and wider; rows, such as of text and of sound, that are twice as long."""
    if x.dim() == 2:
        return torch.cat([x, x], dim=1)
    if x.dim() < 2 or not x.is_floating_point():
        return x
    size = [side + MORE for side in x.shape[-2:]]
    frames = x if x.dim() == 4 else x.reshape(-1, 1, *x.shape[-2:])
    return torch.nn.functional.interpolate(frames, size=size).reshape(*x.shape[:-2], *size)
