"""Optimizer groups, penalty and progress of quantizers, for training loops."""

from collections.abc import Iterator
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from qat.collectives import rank_count, reshard, summed
from qat.inputs import expect_model
from qat.quantizer.base import Quantizer
from qat.text import check_types
from qat.torch_internals import BatchOrInstanceNorm

NORMS = (BatchOrInstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
LOW_BITS = 4  # up to here scales learn as fast as weights, as in the papers; weights on fewer decay less
HIGH_BITS = 8  # from here on scales learn at a tenth of that rate


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    *,
    norm_weight_decay: float = 0.0,
    quantizer_lr_factor: float | None = None,
    quantizer_lr: float | None = None,
    quantizer_weight_decay: float = 0.0,
    weight_decay_by_bits: bool = False,
) -> list[dict[str, Any]]:
    """Sort the parameters of a model into groups for an optimizer.

    Scales must not decay, and learn slower at 8 bits.

    - `weights`: weight_decay.
    - `weights_3_bits`, `weights_2_bits`, if `weight_decay_by_bits` is set: weights of quantized layers on fewer than 4
      bits; weight_decay * 2^(bits - 4), and at 1 bit as at 2. LSQ's (arXiv:1902.08153): the coarser the grid, the less
      a network overfits.
    - `norms`: the parameters of normalisation modules; norm_weight_decay.
    - `biases`: all others that are named bias or have at most one axis; norm_weight_decay.
    - `quantizers_8_bits`, and so on for each width: all parameters inside a `Quantizer`; quantizer_weight_decay, and
      the rate lr * 10^(-(bits - 4) / 4), with bits from 4 to 8: that is lr up to 4 bits, and lr / 10 from 8 bits on,
      where a scale is a hundredth of the values that it rounds. See docs/measurements.md.
    - `quantizers` in their place, if `quantizer_lr_factor` or `quantizer_lr` is given.
    - `quantizers_bits`: the widths of `learned_bits`; 100 * lr, or 100 times the rate that is given for quantizers. A
      width has bits to go where a scale has hundredths of itself.

    Parameters without requires_grad are left out. Those of quantizers that `qat.freeze_scales` froze are in, so that
    the groups stay the same when it is called or undone, and a resumed optimizer finds what it saved.

    Args:
        quantizer_lr_factor: the rate of all quantizer parameters as a factor of lr; None: by bits, as above.
        quantizer_lr: the rate of all quantizer parameters, whatever lr is: for an optimizer of their own, such as
            EWGS's Adam at 1e-5 (arXiv:2104.00903) beside SGD.
        quantizer_weight_decay: a scale that decays shrinks its range.

    Groups have the keys name, params, lr and weight_decay, and are not empty. Each parameter is in exactly one, also if
    it is shared. A model without trainable parameters, a negative number, or two rates for quantizers are a ValueError.

    >>> from qat import prepare
    >>> model = prepare(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), example_inputs=torch.randn(2, 3, 8, 8))
    >>> for group in parameter_groups(model, lr=0.01, weight_decay=1e-4):
    ...     print(group["name"], len(group["params"]), group["lr"], group["weight_decay"])
    weights 1 0.01 0.0001
    norms 2 0.01 0.0
    biases 1 0.01 0.0
    quantizers_8_bits 2 0.001 0.0
    """
    expect_model(parameter_groups, model)
    check_types(parameter_groups, {"weight_decay_by_bits": weight_decay_by_bits})
    _check(
        {"quantizer_lr_factor": quantizer_lr_factor, "quantizer_lr": quantizer_lr},
        lr=lr, weight_decay=weight_decay, norm_weight_decay=norm_weight_decay,
        quantizer_weight_decay=quantizer_weight_decay,
    )  # fmt: skip
    reshard(model)
    bits_of = weight_bits(model) if weight_decay_by_bits else {}
    few = sorted({bits for bits in bits_of.values() if bits < LOW_BITS}, reverse=True)
    rates = {"weights": (lr, weight_decay)}
    rates |= {f"weights_{bits}_bits": (lr, weight_decay * 2.0 ** (max(bits, 2) - LOW_BITS)) for bits in few}
    rates |= {"norms": (lr, norm_weight_decay), "biases": (lr, norm_weight_decay)}
    quantizers = [module for module in model.modules() if isinstance(module, Quantizer)]
    of_quantizers: dict[int, str] = {}
    own = lr * quantizer_lr_factor if quantizer_lr_factor is not None else quantizer_lr
    for quantizer in sorted(quantizers, key=lambda each: -each.spec.bits):  # the order of the groups
        bits = quantizer.spec.bits
        slower = (min(max(bits, LOW_BITS), HIGH_BITS) - LOW_BITS) / (HIGH_BITS - LOW_BITS)  # from 0 to 1
        scales = (f"quantizers_{bits}_bits", lr * 0.1**slower) if own is None else ("quantizers", own)
        for name, parameter in quantizer.named_parameters():
            kind, rate = scales
            if name in quantizer.lr_factors:
                kind, rate = f"quantizers_{name}", (lr if own is None else own) * quantizer.lr_factors[name]
            rates[kind] = (rate, quantizer_weight_decay)
            if parameter.requires_grad or quantizer.is_frozen:
                of_quantizers.setdefault(id(parameter), kind)
    # A parameter that modules share is in one group: that of its quantizer, or else by its first name.
    members: dict[str, list[nn.Parameter]] = {kind: [] for kind in rates}
    of_norms = {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        flat = parameter.dim() <= 1 or name.rpartition(".")[2] == "bias"
        usual = "norms" if id(parameter) in of_norms else "biases" if flat else "weights"
        kind = of_quantizers.get(id(parameter), usual)
        if kind == "weights" and bits_of.get(id(parameter)) in few:
            kind = f"weights_{bits_of[id(parameter)]}_bits"
        if parameter.requires_grad or id(parameter) in of_quantizers:
            members[kind].append(parameter)
    if not any(members.values()):
        raise ValueError("parameter_groups: the model has no trainable parameter; unfreeze some (requires_grad_())")
    return [
        {"name": kind, "params": members[kind], "lr": rate, "weight_decay": decay}
        for kind, (rate, decay) in rates.items()
        if members[kind]
    ]


def _check(rates: dict[str, float | None], **given: float) -> None:
    chosen = {name: rate for name, rate in rates.items() if rate is not None}
    for name, value in (*given.items(), *chosen.items()):
        if not isinstance(value, (Real, Tensor)) or not value >= 0:
            raise ValueError(f"parameter_groups: {name} must be a number of at least 0, got {value!r}")
    if len(chosen) > 1:
        both = " and ".join(f"{name}={rate!r}" for name, rate in chosen.items())
        raise ValueError(f"parameter_groups: {both} are two rates for the same parameters; give one")


def weight_bits(model: nn.Module) -> dict[int, int]:
    """Return the fewest bits on whose grid each parameter is computed, by its id.

    Parameters computed in float are left out. A layer's quantizer stands for all of its parameters, those of a
    parametrization too. Where the graph of a prepared model calls a function with a weight that lies elsewhere
    (`F.linear(x, self.qkv.weight)`), the weight is followed back through the graph.
    """
    found: dict[int, int] = {}
    for module in model.modules():
        quantizers = list(_weight_quantizers(module))
        pairs = [(p, quantizer) for p in module.parameters() for quantizer in quantizers]
        if isinstance(module, fx.GraphModule):
            pairs += _read_by_functions(module)
        for parameter, quantizer in pairs:
            found[id(parameter)] = min(found.get(id(parameter), quantizer.spec.bits), quantizer.spec.bits)
    return found


def _weight_quantizers(module: nn.Module) -> Iterator[Quantizer]:
    # attention and recurrent layers have them in the functions that they are made of
    for each in module.modules() if hasattr(module, "inner_weights") else module.children():
        if isinstance(each, Quantizer) and each.role == "weight":
            yield each


def _read_by_functions(model: fx.GraphModule) -> list[tuple[nn.Parameter, Quantizer]]:
    # `F.linear(x, self.qkv.weight)`: the weight belongs to no layer that has a quantizer.
    found = []
    for node in model.graph.nodes:  # a quantized function gets its weight as its second argument
        if node.op == "call_module" and len(node.args) > 1 and isinstance(node.args[1], fx.Node):
            quantizers = list(_weight_quantizers(model.get_submodule(str(node.target))))
            values = [attrgetter(str(each.target))(model) for each in _origins(node.args[1])] if quantizers else []
            found += [(v, quantizer) for v in values if isinstance(v, nn.Parameter) for quantizer in quantizers]
    return found


def _origins(node: fx.Node) -> set[fx.Node]:
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += each.all_input_nodes
    return {each for each in seen if each.op == "get_attr"}


def penalty(model: nn.Module) -> Tensor:
    """Return the loss terms of a model's rules: PACT's decay, learned bits' cost.

    It is 0 without such rules. It depends on parameters alone: under torch.distributed every rank adds it, and the
    average of the gradients has it once.

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
    """Tell the annealed rules how far the training is.

    They are `stacked_sigmoid`, and `binary` with error decay. Progress goes from 0 at the start to 1 at the end; call
    it before every step or epoch.
    """
    expect_model(set_progress, model)
    if not 0 <= progress <= 1:
        raise ValueError(f"set_progress: progress must be from 0 to 1, got {progress!r}")
    for module in model.modules():
        if isinstance(module, Quantizer):
            module.set_progress(progress)


def replicate_quantizers(model: nn.Module) -> set[nn.Parameter]:
    """Replicate learned quantizer parameters under FSDP2, and average their gradients.

    `fully_shard` takes no parameter without axes, as a scale of a tensor is, and leaves the gradients of what it
    ignores alone. From now on every `backward` averages them, as FSDP2 does with those of weights. Every rank has to
    begin with the same parameters. docs/many_ranks.md has a whole program.

    The model is prepared and calibrated, not yet sharded, on the device of its training. What is returned, the
    parameters of all quantizers, is for `fully_shard(..., ignored_params=...)`.

    >>> import qat
    >>> len(replicate_quantizers(qat.prepare(nn.Sequential(nn.Linear(8, 2)), example_inputs=torch.randn(4, 8))))
    2
    """
    expect_model(replicate_quantizers, model)
    found = {p for module in model.modules() if isinstance(module, Quantizer) for p in module.parameters()}
    for parameter in found:
        learns = parameter.requires_grad
        hooked: Any = parameter.requires_grad_()  # frozen ones too: they may learn later
        hooked.register_post_accumulate_grad_hook(_average_gradient)
        parameter.requires_grad_(learns)
    return found


def _average_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None and rank_count() > 1:  # one process may use the same script
        parameter.grad = summed(parameter.grad) / rank_count()


def scales_at_minimum(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Count learned scales on their floor, and all of them, by the quantizer's name."""
    found = {name: each for name, each in model.named_modules() if isinstance(each, Quantizer)}
    counts = {name: count for name, each in found.items() if (count := each.scales_at_minimum()) is not None}
    resting = torch.stack(list(counts.values())).tolist() if counts else []  # one device synchronisation
    return {
        name: (int(count), sum(p.numel() for p in found[name].positive_parameters()))
        for name, count in zip(counts, resting, strict=True)
    }
