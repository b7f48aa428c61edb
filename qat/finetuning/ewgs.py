"""Delta of element-wise gradient scaling, from the trace of the Hessian."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from qat.collectives import is_sharded, rank_count, reshard, summed
from qat.inputs import expect_model
from qat.kernels import plain_formulas
from qat.quantizer import Quantizer
from qat.quantizer.granularity import to_groups

Batch = TypeVar("Batch")
SPREAD = 3.0  # the paper's G, a gradient that represents a tensor's, in their standard deviations


def update_ewgs(
    model: nn.Module, loss_function: Callable[[nn.Module, Batch], Tensor], batches: Iterable[Batch], draws: int = 1
) -> dict[str, float]:
    """Set the delta of every quantizer with `ewgs="hessian"`.

    The paper calls it every ten epochs. Quantizers that are switched off are left out.

    delta = max(0, scale * (qmax - qmin) * Tr(H)/N / G). H is the Hessian of the loss with respect to the N values of
    the quantized tensor; its trace is estimated with random signs (Hutchinson). G is three standard deviations of their
    gradients. The factor scale * (qmax - qmin) converts a delta for residuals in the tensor's unit to one for shares of
    the grid's range, the unit of `QuantSpec.ewgs_delta`. Under torch.distributed every rank brings batches of its own,
    and all get the deltas of the averages over them.

    Called as loss_function(model, batch), the loss is a scalar; the batches are on the model's device; `draws` is the
    random sign vectors for each. Buffers (BatchNorm statistics) and gradients of the model do not change.

    Returns the new deltas by quantizer name; a ValueError is raised if the weights are sharded (FSDP2), if there is no
    batch, if no quantizer ran (in eval() layers compute on their integers), or if the model has an operation without a
    second derivative.

    Source: Lee et al., "Network Quantization with Element-wise Gradient Scaling", arXiv:2104.00903.
    """
    expect_model(update_ewgs, model)
    quantizers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Quantizer) and module.spec.ewgs == "hessian" and not module.is_disabled
    }
    if not quantizers:
        return {}
    reshard(model)
    if any(is_sharded(parameter) for parameter in model.parameters()):  # the second derivative finds their memory gone
        raise ValueError("update_ewgs: the weights are sharded over the ranks; call it before fully_shard")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    totals = {name: torch.zeros(3, device=module.ewgs_delta.device) for name, module in quantizers.items()}
    generator = torch.Generator().manual_seed(0)  # the same signs in every call, and in a resumed run
    count = 0
    for module in quantizers.values():
        module.ewgs_delta.zero_()  # the Hessian is of the loss itself, without the current correction
    try:
        with torch.enable_grad():
            for batch in batches:
                count += 1
                for name, estimate in _estimates(model, quantizers, loss_function, batch, draws, generator).items():
                    totals[name] += estimate
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    if count == 0:
        raise ValueError("update_ewgs: batches is empty; at least one batch is needed to estimate the Hessian")
    return {name: _set_delta(module, totals[name] / count) for name, module in quantizers.items()}


def _estimates(
    model: nn.Module,
    quantizers: dict[str, Quantizer],
    loss_function: Callable[[nn.Module, Batch], Tensor],
    batch: Batch,
    draws: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    # By quantizer that ran: mean of the Hessian's diagonal, deviation of the gradients, scale.
    outputs: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}

    def note(module: Quantizer, inputs: tuple[Tensor], output: Tensor, name: str) -> None:
        outputs[name] = output
        scales[name] = module.grid(to_groups(inputs[0].detach(), module.spec))[0].detach().float().mean()

    with ExitStack() as hooks, plain_formulas():  # kernels have no second derivatives
        for name, module in quantizers.items():
            hooks.enter_context(module.register_forward_hook(partial(note, name=name)))
        loss = loss_function(model, batch)
    names = [name for name, output in outputs.items() if output.requires_grad]
    tensors = [outputs[name] for name in names]
    if not tensors:
        raise ValueError(
            "update_ewgs: no quantizer with ewgs='hessian' ran with a gradient; put the model into train()"
        )
    try:
        gradients, diagonal = _gradients_and_diagonal(loss, tensors, draws, generator)
    except (RuntimeError, NotImplementedError) as error:
        if "is not implemented" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"update_ewgs: an operation of the model has no second derivative ({reason}); use ewgs='fixed'"
        ) from error
    return {
        name: torch.stack([trace, gradient.detach().float().std(correction=0), scales[name]])
        for name, trace, gradient in zip(names, diagonal, gradients, strict=True)
    }


def _gradients_and_diagonal(
    loss: Tensor, tensors: list[Tensor], draws: int, generator: torch.Generator
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    gradients = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
    diagonal = [torch.zeros((), device=tensor.device) for tensor in tensors]
    for _ in range(draws):
        signs = [
            (torch.randint(2, tensor.shape, generator=generator) * 2 - 1).to(tensor.device, tensor.dtype)
            for tensor in tensors
        ]
        product = torch.stack([(g * s).sum().float() for g, s in zip(gradients, signs, strict=True)]).sum()
        if not product.requires_grad:  # the loss has no curvature
            break
        hessian_signs = torch.autograd.grad(product, tensors, retain_graph=True, materialize_grads=True)
        for number, (row, sign) in enumerate(zip(hessian_signs, signs, strict=True)):
            diagonal[number] = diagonal[number] + (row.float() * sign.float()).mean() / draws
    return gradients, diagonal


@torch.no_grad()
def _set_delta(quantizer: Quantizer, estimate: Tensor) -> float:
    estimate = summed(estimate) / rank_count()  # each rank saw batches of its own
    trace, deviation, scale = estimate.unbind()
    delta = scale * quantizer.span() * trace / (SPREAD * deviation)
    delta = torch.where(delta.isfinite() & (delta > 0), delta, 0.0)  # NaN for a tensor without gradients
    quantizer.ewgs_delta.copy_(delta)
    return float(delta)
