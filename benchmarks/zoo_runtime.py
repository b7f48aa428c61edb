"""Exported parts of a model in ONNX Runtime against torch: the integers of every layer, and the outputs."""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from qat.contexts import evaluating
from qat.export.agreement import output_tensors
from qat.export.onnxruntime.session import open_session, run_session
from qat.export.onnxruntime.verification import LayerComparison, LayerDifference
from qat.inputs import Inputs, call_model
from qat.preparation.parts import prepared_parts

MOST_DIFFERING = 1e-3
"""Share of a layer's integers that may differ but for near-ties, by one level; of few integers, three deviations of
chance more."""

TIE = 1e-4
"""Answers that are nearer than this, in standard deviations of the output, count as equally large."""

LARGEST_GAP = 1e-3
"""How far an output may be off, in its standard deviations, computed by torch from ONNX Runtime's last integers."""


@dataclass(frozen=True)
class Part:
    """A traced piece of a model, and what it is called with."""

    name: str  # its path in the model; "" for the whole model
    module: fx.GraphModule
    inputs: Inputs  # of a part its positional arguments, defaults filled in


def parts_of(model: nn.Module, inputs: Inputs) -> list[Part]:
    """The outermost prepared graphs that run, in the order in which they do, with the arguments of their first call."""
    parts = prepared_parts(model)
    if "" in parts:
        return [Part("", parts[""], inputs)]
    found: dict[str, Part] = {}
    outermost = [name for name in parts if not any(name.startswith(f"{other}.") for other in parts)]

    def note(name: str, module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in found:
            # Copies: a model may go on to write into what it passed.
            args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
            bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
            bound.apply_defaults()
            found[name] = Part(name, module, tuple(bound.arguments.values())[1:])

    handles = [
        parts[name].register_forward_pre_hook(
            lambda module, args, kwargs, name=name: note(name, module, args, kwargs), with_kwargs=True
        )
        for name in outermost
    ]
    try:
        with evaluating(model), torch.no_grad():
            call_model(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return list(found.values())


def agreement(files: list[tuple[Part, Path]]) -> dict[str, Any]:
    """How ONNX Runtime answers for every part, next to torch: its integers layer by layer, and whole runs."""
    layers: list[LayerDifference] = []
    gaps: list[float] = []
    equal = compared = 0
    for part, path in files:
        prefix = f"{part.name}." if part.name else ""
        differences, followed = LayerComparison(path, part.module).follow(part.inputs)
        for layer in differences:
            layers.append(replace(layer, name=prefix + layer.name))
        for ours, theirs in followed:
            if ours.numel():
                gaps.append(gap(ours, theirs))
        for ours, theirs in outputs(part, path):
            if ours.dim() > 1 and ours.shape[1] > 1:
                same = same_largest(ours, theirs)
                equal, compared = equal + int(same.sum()), compared + same.numel()
    off = sorted((layer for layer in layers if beyond(layer)), key=lambda layer: (-layer.largest, -layer.differing))
    facts: dict[str, Any] = {
        "layers": len(layers),
        "integers": sum(layer.elements for layer in layers),
        "differing": sum(layer.differing for layer in layers),
        "beyond_ties": sum(layer.beyond_ties for layer in layers),
        "largest": max((layer.largest for layer in layers), default=0),
        "beyond": [[layer.name, layer.elements, layer.differing, layer.largest] for layer in off[:5]],
        "layers_beyond": len(off),
        "output_gap": max(gaps, default=0.0),
        "arg_max_equal": equal,
        "arg_max_compared": compared,
    }
    why = _disagreement(facts)
    return facts | {"ok": why is None} | ({} if why is None else {"reason": why})


def beyond(layer: LayerDifference) -> bool:
    """Whether more of a layer's integers differ than may; a value between two levels may go to either."""
    expected = MOST_DIFFERING * layer.elements
    return layer.largest > 1 or layer.beyond_ties > 1 + expected + 3 * expected**0.5


def _disagreement(facts: dict[str, Any]) -> str | None:
    if facts["layers_beyond"]:
        name, elements, differing, largest = facts["beyond"][0]
        return (
            f"{facts['layers_beyond']} of {facts['layers']} layers differ from ONNX Runtime; {name}: {differing} of"
            f" {elements} integers, by up to {largest}"
        )
    if not facts["output_gap"] <= LARGEST_GAP:
        return f"an output is off by {facts['output_gap']:.2g} of its standard deviation from the same integers"
    return None


def outputs(part: Part, path: Path) -> list[tuple[Tensor, Tensor]]:
    """Every floating-point output of a part, from torch and from ONNX Runtime."""
    theirs = run_session(open_session(path), part.inputs)
    with evaluating(part.module), torch.no_grad():
        ours = output_tensors(call_model(part.module, part.inputs))
    if [list(one.shape) for one in ours] != [list(other.shape) for other in theirs]:
        raise ValueError(
            f"{part.name or 'the model'}: outputs {[list(one.shape) for one in ours]}, and its file has"
            f" {[list(other.shape) for other in theirs]}"
        )
    return [(one.float(), other.float()) for one, other in zip(ours, theirs, strict=True) if one.numel()]


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference in standard deviations of our output; infinite where one of the two is not finite."""
    difference = (ours - theirs).abs().max()
    if not bool(difference.isfinite()):
        return float("inf")
    return float(difference / ours.std(correction=0)) if float(difference) else 0.0


def same_largest(ours: Tensor, theirs: Tensor) -> Tensor:
    """Where both have the same arg max over axis 1, or ours is as large at theirs but for a tie."""
    chosen = ours.gather(1, theirs.argmax(1, keepdim=True))
    return ours.amax(1, keepdim=True) - chosen <= TIE * ours.std(correction=0)
