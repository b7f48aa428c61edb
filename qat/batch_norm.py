"""Running statistics of BatchNorm: estimated anew, frozen, or of all ranks."""

import logging
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qat.collectives import of_all_ranks, rank_count, reshard, summed
from qat.contexts import evaluating
from qat.inputs import Batch, as_batches, expect_model, inputs_and_labels, run_batch
from qat.text import some
from qat.torch_internals import AnyBatchNorm


@torch.no_grad()
def reestimate_batch_norm(model: nn.Module, batches: Iterable[Batch]) -> int:
    """Compute the running statistics of every BatchNorm anew, from these batches.

    Training normalises with the statistics of each batch, evaluation with running ones. After a short training, or with
    a small momentum, these lag behind the weights, and evaluation computes another function than training did. All
    other modules are in evaluation meanwhile: no dropout, no range moves. Under torch.distributed every rank brings
    batches of its own, and all get the averages over all of them.

        mean = average of the batches' means;    var = average of their variances

    Only buffers of BatchNorms change, not of frozen ones. The batches are as for `calibrate`, at least two images in
    each: some 5,000 training images, augmented as in training. The network was trained to be normalised by their
    statistics, and not by those of plain images: with black borders from crops a MobileNetV2 at 4 bits lost 2.9 points
    on CIFAR-10 to statistics of plain ones.

    Returns the number of BatchNorms that were computed anew: 0 for a model without any, or if batches reached none.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    >>> reestimate_batch_norm(model, [torch.randn(64, 4) + 5])
    1
    """
    given = as_batches(reestimate_batch_norm, model, batches)
    norms = batch_norms(model)
    before = [(norm, norm.momentum, copied_statistics(norm)) for norm in norms]
    count = 0
    try:
        with evaluating(model):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # in torch: the plain average of all batches
                norm.train()
            for batch in given:
                count += 1
                run_batch("reestimate_batch_norm", model, inputs_and_labels("reestimate_batch_norm", batch)[0])
        if not any(of_all_ranks(count > 0)):
            raise ValueError("reestimate_batch_norm: batches is empty; at least one batch is needed")
        for norm in norms if rank_count() > 1 else ():
            mine = norm.num_batches_tracked.clone()  # batches of this rank that reached it
            norm.num_batches_tracked.copy_(summed(mine))
            for average in (norm.running_mean, norm.running_var):
                average.copy_(summed(average * mine) / norm.num_batches_tracked.clamp(min=1))
    except BaseException:
        for norm, _, statistics in before:
            restore_statistics(norm, statistics)
        raise
    finally:
        for norm, momentum, _ in before:
            norm.momentum = momentum
        reshard(model)  # an optimizer may be created next
    unreached = [each for each in before if not int(each[0].num_batches_tracked)]
    for norm in norms:  # they are no longer young, whatever the number of batches
        if int(norm.num_batches_tracked) and norm.momentum and norm.momentum < 1:
            norm.num_batches_tracked.clamp_(min=math.ceil(math.log(YOUNG) / math.log(1 - norm.momentum)))
    for norm, _, statistics in unreached:  # such as auxiliary classifiers, which only run in training
        restore_statistics(norm, statistics)
    return len(norms) - len(unreached)


def freeze_batch_norm(model: nn.Module, frozen: bool = True) -> int:
    """Freeze the running statistics of every BatchNorm, and normalise with them.

    Training normalises with them too, while gamma and beta learn. It survives `model.train()`, copies and pickles, and
    `reestimate_batch_norm` leaves frozen statistics alone. Like train() and eval() it is not in the state dict: after
    loading one to go on with training, freeze again. With frozen=False they use and follow the statistics of the
    batches again.

    Returns the number of BatchNorms; those without running statistics have nothing to freeze.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    >>> freeze_batch_norm(model)
    1
    >>> model.train()[1].training
    False
    """
    expect_model(freeze_batch_norm, model, locals())
    norms = batch_norms(model, frozen=not frozen)
    for norm in norms:
        if frozen:
            norm.eval()
            norm.train = partial(_stay_in_evaluation, norm)  # on the instance: it also marks a frozen one
        else:
            del norm.train
            norm.train(model.training)
    return len(batch_norms(model, frozen=frozen))


def _stay_in_evaluation(norm: nn.Module, mode: bool = True) -> nn.Module:
    return norm


def sync_batch_norm(model: nn.Module) -> int:
    """Let every BatchNorm normalise with the statistics of all ranks' batches.

    In training, they are those of one large batch. On CUDA it is `torch.nn.SyncBatchNorm`, which torch has for GPUs
    alone; on the CPU a formula. Use it where a rank has few images; it costs exchanges in each layer and direction, and
    BatchNorm then runs on its own, outside of the fused passes. It folds and exports as before, its state dict is
    BatchNorm's, and without torch.distributed it computes as BatchNorm does.

    The model is on the device of its training; its modules stay and change their class. Returns the number of
    BatchNorms.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    >>> sync_batch_norm(model)
    1
    """
    expect_model(sync_batch_norm, model)
    norms = batch_norms(model) + batch_norms(model, frozen=True)
    for norm in norms:
        # The class changes and the module stays, so that optimizers and hooks keep it.
        norm.__class__ = CUDASyncBatchNorm if norm.running_mean.is_cuda else SyncBatchNorm
        norm.process_group = None  # torch's class reads it; None is all ranks
    return len(norms)


class CUDASyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm of torch, for CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x of shape (N, C, ...) for each channel."""
        # torch's own asks torch.distributed for the number of ranks, and would not see `this_rank_alone`.
        return super().forward(x) if rank_count() > 1 else AnyBatchNorm.forward(self, x)


class SyncBatchNorm(AnyBatchNorm):
    """BatchNorm over the images of all ranks, on the CPU.

    Gradients pass through the sums of all ranks.

    mean = sum(x) / n;    var = sum((x - mean)^2) / n;    y = (x - mean) / sqrt(var + eps) * weight + bias

    The sums run over the images and pixels of all ranks, n of them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x of shape (N, C, ...) for each channel."""
        if rank_count() == 1 or not self.training:
            return super().forward(x)
        axes, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
        n = summed(x.new_tensor(x.numel() // x.shape[1]))
        mean = summed(x.sum(axes)) / n
        centred = x - mean.view(shape)
        var = summed(centred.square().sum(axes)) / n
        self._follow(mean.detach(), var.detach() * n / (n - 1))  # running variances are unbiased, as in torch
        y = centred * (var + self.eps).rsqrt().view(shape)
        return y if self.weight is None else y * self.weight.view(shape) + self.bias.view(shape)

    def _check_input_dim(self, x: Tensor) -> None:
        pass  # BatchNorm1d, 2d and 3d are replaced alike

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(var.to(self.running_var.dtype), share)


def batch_norms(model: nn.Module, frozen: bool = False) -> list[Any]:
    """Return the BatchNorms with running statistics, either frozen or not frozen."""
    norms = [each for each in model.modules() if isinstance(each, AnyBatchNorm) and each.running_mean is not None]
    return [each for each in norms if ("train" in vars(each)) == frozen]


YOUNG = 0.01  # share of its first value in a running statistic, above which it says little of the data


def is_young(norm: Any) -> bool:
    """Return True if running statistics are mostly those that the BatchNorm began with: mean 0, variance 1."""
    count, momentum = int(norm.num_batches_tracked), norm.momentum
    share = (1 - momentum) ** count if momentum is not None else float(count == 0)
    # A checkpoint may come without the count; its variances then are others.
    untouched = bool((norm.running_var >= 0.999 * share).all()) and (count > 0 or not norm.running_mean.any())
    return share > YOUNG and untouched


def warn_of_young_norms(model: nn.Module) -> None:
    """Warn of BatchNorms with too few batches: ranges behind them fit no later step."""
    young = {each for each in batch_norms(model) if is_young(each)}
    if names := [name for name, each in model.named_modules() if each in young]:
        logging.getLogger("qat").warning(
            "calibrate: %d BatchNorms have seen too few batches, or none, and their statistics are not the data's (%s);"
            " steps behind these ranges may diverge; train the float model longer, or call"
            " qat.reestimate_batch_norm(model, batches)", len(names), some(names),
        )  # fmt: skip


def copied_statistics(model: nn.Module) -> list[Tensor]:
    """Return copies of the running statistics of all BatchNorms."""
    return [buffer.clone() for norm in batch_norms(model) for buffer in norm.buffers()]


@torch.no_grad()
def restore_statistics(model: nn.Module, statistics: list[Tensor]) -> None:
    """Put back statistics of `copied_statistics`."""
    buffers = [buffer for norm in batch_norms(model) for buffer in norm.buffers()]
    for buffer, value in zip(buffers, statistics, strict=True):
        buffer.copy_(value)
