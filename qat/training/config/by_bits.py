"""What a config leaves out of `qat` and its stages, chosen by their bits: the optimizer and its rate."""

from typing import Any

from qat.quantizer.training import FEW

TENSORS = ("weight", "activation")

SGD_RATE = 0.01

ADAMW_RATE = 5e-4
"""AdamW's at 4 bits: twice that for every bit less, since weights have further to go from one level to the next."""


def with_choices_by_bits(tree: Any) -> Any:
    """A copy of a config's mapping in which `qat` and `qat.progressive` say optimizer and lr: AdamW up to `FEW` bits.

    Each key is chosen on its own: whoever sets lr keeps the optimizer of the bits. The schema refuses what is not a
    mapping. Measured on 5,000 held-out training images of CIFAR-10 (docs/measurements.md).

    >>> with_choices_by_bits({"quantization": {"weight": {"bits": 2}, "activation": {"bits": 4}}})["qat"]
    {'optimizer': 'adamw', 'lr': 0.002}
    >>> with_choices_by_bits({"qat": {"lr": 0.001}, "quantization": {"weight": {"bits": 2}}})["qat"]
    {'optimizer': 'adamw', 'lr': 0.001}
    >>> with_choices_by_bits({})["qat"]
    {'optimizer': 'sgd', 'lr': 0.01}
    """
    stage = tree.get("qat", {}) if isinstance(tree, dict) else None
    if not isinstance(stage, dict):
        return tree
    bits = _bits(tree.get("quantization"), dict.fromkeys(TENSORS, 8))
    fewest = min(bits.values())
    optimizer = stage.get("optimizer", "adamw" if fewest <= FEW else "sgd")
    stage = {"optimizer": optimizer, "lr": rate(optimizer, fewest), **stage}
    earlier = stage.get("progressive")
    if "lr" not in tree.get("qat", {}) and isinstance(earlier, list | tuple):
        stage["progressive"] = [_with_rate(each, optimizer, bits) for each in earlier]
    return {**tree, "qat": stage}


def rate(optimizer: Any, bits: int) -> float:
    """The peak learning rate for weights on so many bits, 1 to 16.

    >>> [rate("adamw", bits) for bits in (1, 2, 3, 4, 8, 16)]
    [0.002, 0.002, 0.001, 0.0005, 3.125e-05, 3.125e-05]
    """
    return ADAMW_RATE * 2.0 ** (FEW - min(max(bits, 2), 8)) if optimizer == "adamw" else SGD_RATE


def _with_rate(stage: Any, optimizer: Any, bits: dict[str, int]) -> Any:
    """A stage of `qat.progressive` with a rate for its own bits; those of the run where it leaves them out."""
    if not isinstance(stage, dict) or not stage:  # an empty one is refused
        return stage
    common = _whole(stage.get("bits"))
    own = _bits(stage, bits if common is None else dict.fromkeys(TENSORS, common))
    return {"lr": rate(optimizer, min(own.values())), **stage}


def _bits(grids: Any, default: dict[str, int]) -> dict[str, int]:
    """The bits of weights and of activations."""
    specs = {tensor: grids.get(tensor) if isinstance(grids, dict) else None for tensor in TENSORS}
    given = {tensor: _whole(spec.get("bits")) if isinstance(spec, dict) else None for tensor, spec in specs.items()}
    return {tensor: default[tensor] if bits is None else bits for tensor, bits in given.items()}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
