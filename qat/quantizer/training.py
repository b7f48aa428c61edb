"""What a training loop owes the rules of a model: their share of the loss, and how far the training is."""

import torch
from torch import Tensor, nn

from qat.expected import expect_model
from qat.quantizer.base import Quantizer


def penalty(model: nn.Module) -> Tensor:
    """What the rules of a model add to the loss: PACT's decay of alpha, the cost of learned bits; 0 without such rules.

    Args:
        model: prepared, or any module that holds quantizers.

    Returns:
        A scalar to add to the loss before `backward`.

    >>> from qat.quantizer import PACTQuantizer
    >>> from qat.spec import QuantSpec
    >>> round(penalty(PACTQuantizer(QuantSpec(signed=False, rule="pact"))).item(), 6)  # 2e-4/2 * 4^2
    0.0016
    """
    expect_model(penalty, model)
    parts = [module.penalty() for module in model.modules() if isinstance(module, Quantizer)]
    given = [part for part in parts if part is not None]
    return torch.stack(given).sum() if given else torch.zeros(())


def set_progress(model: nn.Module, progress: float) -> None:
    """Tell the annealed rules (`stacked_sigmoid`, `binary` with error decay) how far the training is.

    Args:
        model: prepared, or any module that holds quantizers.
        progress: 0 at the start to 1 at the end; call it before every step or epoch.

    Raises:
        ValueError: if progress is outside.
    """
    expect_model(set_progress, model)
    if not 0 <= progress <= 1:
        raise ValueError(f"set_progress: progress must be from 0 to 1, got {progress!r}")
    for module in model.modules():
        if isinstance(module, Quantizer):
            module.set_progress(progress)


def resting_scales(model: nn.Module) -> dict[str, tuple[int, int]]:
    """How many learned scales rest on their floor, and how many there are, by the name of their quantizer.

    Quantizers that learn no scale are left out.
    """
    found = {name: each for name, each in model.named_modules() if isinstance(each, Quantizer)}
    counts = {name: count for name, each in found.items() if (count := each.resting_on_floor()) is not None}
    resting = torch.stack(list(counts.values())).tolist() if counts else []  # one device synchronisation
    return {
        name: (int(count), sum(p.numel() for p in found[name].positive_parameters()))
        for name, count in zip(counts, resting, strict=True)
    }
