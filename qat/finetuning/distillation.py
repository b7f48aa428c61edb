"""Distillation: the quantized model also learns from a float model's answers."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.analysis.features import feature_extractor
from qat.contexts import evaluating
from qat.inputs import expect_model
from qat.preparation.prepared_graph import PreparedGraph
from qat.text import did_you_mean

LOGITS = "logits"  # key of the model's own output beside its features


class Distillation:
    """Loss that draws a student's logits to a teacher's (arXiv:1503.02531).

    With z the student's logits of a batch, t the teacher's of the same images, and T the temperature:

        loss = weight * T^2 * mean over the batch and all positions of KL(softmax(t / T) || softmax(z / T))
               + sum over features of weight_f * mean((s_f - t_f)^2) / mean(t_f^2)

    with s_f and t_f the outputs of a module of both models (arXiv:1412.6550). Its gradient by z is
    weight * T * (softmax(z / T) - softmax(t / T)) / number of answers. Logits are (N, C), or (N, C, d1, ...) with an
    answer for each position, as in `F.cross_entropy`; for (N, d1, ..., C), such as tokens, class_dim is -1.

    LSQ adds it to the cross-entropy of the labels, one to one, with T = 1 (arXiv:1902.08153, section 3.6). A higher
    temperature says more about wrong classes, and costs much at few bits: ResNet-20 W3A8 80.9 % with T = 5, 91.4 % with
    T = 1. It costs one forward of the teacher in every step, about a third of a float step if that is the float model
    itself. Under torch.distributed the batch is the rank's, and averaged gradients are those of the global batch;
    mean(t_f^2) stays the rank's own.

    Args:
        teacher: a float model that returns logits, on the device of the images; it is used in eval mode, without
            gradients, and its own mode and parameters stay as they are.
        temperature: T, above 0.
        weight: of this loss beside the task's, at least 0.
        amp: type of autocast in the teacher's forward, such as torch.bfloat16; None for its own precision. Where the
            processor has bfloat16 it halves the teacher's cost.
        features: names of modules that both models have, whose outputs are of the same shape, with their weights.
            The student then is `watching(model)`, which returns these outputs too.
        class_dim: dimension of the logits along which the classes lie.

    >>> teacher, student, images = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(8, 4)
    >>> distillation = Distillation(teacher)
    >>> logits, labels = student(images), torch.zeros(8, dtype=torch.long)
    >>> loss = F.cross_entropy(logits, labels) + distillation(logits, images)
    >>> bool(distillation(teacher(images), images).abs() < 1e-6)
    True
    """

    def __init__(
        self,
        teacher: nn.Module,
        *,
        temperature: float = 1.0,
        weight: float = 1.0,
        amp: torch.dtype | None = None,
        features: Mapping[str, float] | None = None,
        class_dim: int = 1,
    ) -> None:
        expect_model(Distillation, teacher, locals())
        if not temperature > 0:
            raise ValueError(f"Distillation: temperature must be above 0, got {temperature!r}")
        for share in (weight, *(features or {}).values()):
            if not share >= 0:
                raise ValueError(f"Distillation: weight must be at least 0, got {share!r}")
        self.features, self.class_dim = dict(features or {}), class_dim
        self._asked = _watched(teacher, list(self.features))
        self.teacher, self.temperature, self.weight, self.amp = teacher, temperature, weight, amp

    def watching(self, model: nn.Module) -> nn.Module:
        """Return the student to call in training; with features, it returns them too.

        Without features it is the model; else it has the model's modules.
        """
        return _watched(model, list(self.features))

    def __call__(self, output: Tensor | Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return the loss of a student's output: logits, or that of `watching`."""
        answers = self.answers(images)
        student: Mapping[str, Tensor] = {LOGITS: output} if isinstance(output, Tensor) else output
        for name, answer in answers.items():
            if answer.shape != student[name].shape:
                raise ValueError(
                    f"Distillation: {name}: the teacher's are {tuple(answer.shape)}, the student's"
                    f" {tuple(student[name].shape)}; both need the same shape"
                )
        if not -answers[LOGITS].dim() <= self.class_dim < answers[LOGITS].dim():
            raise ValueError(f"Distillation: logits {tuple(answers[LOGITS].shape)} have no class_dim {self.class_dim}")
        loss = self.weight * self._divergence(student[LOGITS], answers[LOGITS])
        for name, weight in self.features.items():
            found, wanted = (each[name].to(loss.dtype) for each in (student, answers))
            loss = loss + weight * F.mse_loss(found, wanted) / wanted.square().mean().clamp_min(1e-12)
        return loss

    def _divergence(self, logits: Tensor, answers: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)  # half precision loses small probabilities
        student, teacher = (F.log_softmax(z.to(wide) / self.temperature, self.class_dim) for z in (logits, answers))
        divergence = F.kl_div(student, teacher, log_target=True, reduction="none").sum(self.class_dim)
        return self.temperature**2 * divergence.mean()

    @torch.no_grad()
    def answers(self, images: Tensor) -> dict[str, Tensor]:
        """Return the teacher's logits, under the key "logits", and its features by name."""
        amp = torch.autocast(images.device.type, self.amp or torch.bfloat16, enabled=self.amp is not None)
        with evaluating(self.teacher), amp:
            returned: Any = self._asked(images)
        answers: dict[str, Any] = returned if self.features else {LOGITS: returned}
        if not isinstance(answers[LOGITS], Tensor):
            kind = type(answers[LOGITS]).__name__
            raise TypeError(f"Distillation: the teacher must return a tensor of logits, got {kind}")
        return answers


def _watched(model: nn.Module, names: list[str]) -> nn.Module:
    if not names:
        return model
    if isinstance(model, PreparedGraph):  # it calls the layers in a block, not the block: hooks on that never fire
        return feature_extractor(model, {"": LOGITS, **{name: name for name in names}})
    return _Watching(model, names)


class _Watching(nn.Module):
    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        modules = dict(model.named_modules())
        for name in names:
            if name not in modules:
                hint = did_you_mean(name, modules, count=3) or f"modules are called {', '.join(list(modules)[1:4])} ..."
                raise ValueError(f"features: {type(model).__name__} has no module {name!r}; {hint}")
        self.train(model.training)  # a new module is in training, whatever its children are

    def forward(self, *inputs: object) -> dict[str, object]:
        found: dict[str, object] = {}

        def keep(_module: nn.Module, _inputs: object, output: object, name: str) -> None:
            found[name] = output

        with ExitStack() as hooks:  # for this call alone: a copy of the model would keep them
            for name in self.names:
                hooks.enter_context(self.model.get_submodule(name).register_forward_hook(partial(keep, name=name)))
            output = self.model(*inputs)
        return {LOGITS: output, **found}
