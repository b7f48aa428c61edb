"""`allocate`: bits of each layer for the least predicted loss within a budget."""

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

Choice = TypeVar("Choice", bound=Hashable)

Table = Mapping[str, Mapping[Choice, float]]
"""A number for each choice of each layer."""


def allocate(
    losses: Table[Choice], costs: Mapping[str, Table[Choice]], budgets: Mapping[str, float]
) -> dict[str, Choice]:
    """Choose for each layer, for the least sum of losses within budgets of costs.

        minimise sum(losses[layer][choice])   such that   sum(costs[kind][layer][choice]) <= budgets[kind]

    It is exact: an integer program, solved by HiGHS (`scipy.optimize.milp`; `pip install "ste-qat[bits]"`). That the
    losses of layers add up is an assumption of the method: measure what comes out.

    Args:
        losses: of each layer (or group of layers), for each choice, such as its bits: `qat.layer_losses`; finite.
        costs: tables like it, by kind: bytes and bit operations of `qat.cost`, or what you measured; at least 0.
        budgets: the most of each kind that is allowed.

    Returns:
        The choice of each layer, in the order of losses.

    Raises:
        ValueError: if a number is missing or out of its range, a budget is of a kind without costs, or no choice keeps
            the budgets.
        ImportError: without SciPy.

    Source: bit-widths by integer programming, Yao et al., "HAWQ-V3", arXiv:2011.10680; the loss is measured here, and
    not estimated by the Hessian.

    >>> losses = {"conv1": {8: 0.0, 4: 0.5}, "conv2": {8: 0.0, 4: 0.1}}
    >>> sizes = {"conv1": {8: 100, 4: 50}, "conv2": {8: 100, 4: 50}}
    >>> allocate(losses, {"bytes": sizes}, {"bytes": 150})
    {'conv1': 8, 'conv2': 4}
    """
    if unknown := next((kind for kind in budgets if kind not in costs), None):
        raise ValueError(f"allocate: a budget of {unknown!r}, and costs of {', '.join(map(repr, costs)) or 'nothing'}")
    _check(losses, -math.inf, "the loss")
    for kind, most in budgets.items():
        _check({layer: {choice: costs[kind].get(layer, {}).get(choice, math.nan) for choice in given}
                for layer, given in losses.items()}, 0, f"what {kind!r} has")  # fmt: skip
        if not 0 <= most < math.inf:
            raise ValueError(f"allocate: the budget of {kind} must be a number from 0, got {most}")
        least = sum(min(costs[kind][layer][choice] for choice in given) for layer, given in losses.items())
        if least > most:
            raise ValueError(f"allocate: the cheapest choices take {least:g} {kind}, and the budget is {most:g}")
    pairs = [(layer, choice) for layer, given in losses.items() for choice in given]
    rows = [[costs[kind][layer][choice] / (most or 1) for layer, choice in pairs] for kind, most in budgets.items()]
    chosen = _solved(
        [losses[layer][choice] for layer, choice in pairs],
        [[float(layer == each) for layer, _ in pairs] for each in losses],
        # Costs are shares of their budget; 1e-9 covers the rounding of their sum.
        [(row, 1 + 1e-9 if most else 0.0) for row, most in zip(rows, budgets.values(), strict=True)],
    )
    return {layer: choice for (layer, choice), taken in zip(pairs, chosen, strict=True) if taken}


def _check(numbers: Table[Choice], least: float, what: str) -> None:
    if not numbers or not all(numbers.values()):
        raise ValueError("allocate: every layer needs choices, and there must be a layer")
    for layer, given in numbers.items():
        for choice, value in given.items():
            if not (math.isfinite(value) and value >= least):
                above = "" if least == -math.inf else f" from {least}"
                raise ValueError(f"allocate: {what} of {layer!r} at {choice!r} must be a number{above}, got {value}")


def _solved(losses: list[float], layers: list[list[float]], limits: list[tuple[list[float], float]]) -> list[bool]:
    # Take one pair of a layer and a choice in each row of layers, with no row's sum above its limit.
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    values = np.array(losses)
    constraints = [LinearConstraint(np.array(layers), 1, 1)]
    constraints += [LinearConstraint(np.array(row), ub=most) for row, most in limits]
    found = milp(
        values / (np.abs(values).max() or 1),  # the solver's tolerances are absolute
        integrality=np.ones_like(values),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if not found.success:
        raise ValueError("allocate: no choice keeps all budgets at once")
    return [bool(round(x)) for x in found.x]
