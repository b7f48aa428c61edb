"""Distillation: its loss and gradient by the published formula, and the teacher of a run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qat
from qat.finetuning import Distillation
from tests.runs.small_run import refusal, start
from tests.runs.tiny_training import curves


class Answers(nn.Module):
    """A teacher whose logits are given; it notes in which mode it was asked."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits, self.modes = nn.Parameter(logits), list[bool]()

    def forward(self, images: Tensor) -> Tensor:
        self.modes.append(self.training)
        return self.logits[: len(images)]


def softmax(z: np.ndarray, dim: int) -> np.ndarray:
    e = np.exp(z - z.max(dim, keepdims=True))
    return np.asarray(e / e.sum(dim, keepdims=True))


@pytest.mark.parametrize(("shape", "dim"), [
    ((6, 4), 1), ((6, 4, 5), 1), ((6, 5, 4), -1), ((6, 5, 4), 2), ((6, 4, 2, 3), 1), ((6, 2, 3, 4), -1),
    ((6, 4, 2, 2, 2), 1),
])  # fmt: skip
@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 1.0), (5.0, 0.3)])
def test_loss_and_gradient_are_those_of_the_formula(
    temperature: float, weight: float, shape: tuple[int, ...], dim: int
) -> None:
    generator = np.random.default_rng(0)
    z, t = generator.normal(size=(2, *shape)) * 3
    p, q = softmax(t / temperature, dim), softmax(z / temperature, dim)
    answers = z.size // shape[dim]
    expected = weight * temperature**2 * (p * (np.log(p) - np.log(q))).sum() / answers
    logits = torch.tensor(z, requires_grad=True)
    teacher = Answers(torch.tensor(t))
    given = {} if dim == 1 else {"class_dim": dim}
    loss = Distillation(teacher, temperature=temperature, weight=weight, **given)(logits, torch.zeros(6, 1))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    np.testing.assert_allclose(logits.grad.numpy(), weight * temperature * (q - p) / answers, rtol=1e-9, atol=1e-12)
    assert teacher.logits.grad is None and teacher.modes == [False] and teacher.training


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Distillation: model must be a torch\.nn\.Module, got str"):
        Distillation("resnet18")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Distillation: temperature must be above 0, got 0"):
        Distillation(nn.Identity(), temperature=0)
    with pytest.raises(ValueError, match="Distillation: weight must be at least 0, got -1"):
        Distillation(nn.Identity(), weight=-1)
    with pytest.raises(ValueError, match=r"logits: the teacher's are \(4, 3\), the student's \(4, 2\); both need"):
        Distillation(Answers(torch.zeros(4, 3)))(torch.zeros(4, 2), torch.zeros(4, 1))
    with pytest.raises(ValueError, match=r"Distillation: logits \(4,\) have no class_dim 1"):
        Distillation(Answers(torch.zeros(4)))(torch.zeros(4), torch.zeros(4, 1))


def block() -> nn.Sequential:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(layers, nn.Flatten(), nn.Linear(16, 3))


def test_features_are_those_of_the_same_module_of_both_models() -> None:
    torch.manual_seed(0)
    teacher, images = block().eval(), torch.randn(6, 3, 4, 4)
    model = qat.prepare(block(), example_inputs=images)
    qat.calibrate(model, [images])
    distillation = Distillation(teacher, weight=0.0, features={"0": 0.5})
    student = distillation.watching(model.eval())
    output = student(images)
    torch.testing.assert_close(output["logits"], model(images), rtol=0, atol=0)
    wanted = teacher[0](images).detach().numpy().astype(float)
    expected = 0.5 * ((output["0"].detach().numpy() - wanted) ** 2).mean() / (wanted**2).mean()
    loss = distillation(output, images)
    assert loss.item() == pytest.approx(expected, rel=1e-5) and expected > 0.01
    loss.backward()  # type: ignore[no-untyped-call]
    assert model.get_submodule("0.0").weight.grad.abs().sum() > 0
    assert model.get_submodule("2").weight.grad.abs().sum() == 0  # its weight is behind the block
    assert distillation({"logits": teacher(images), "0": teacher[0](images)}, images).item() == pytest.approx(
        0, abs=1e-9
    )


def test_features_of_float_students_and_unknown_modules() -> None:
    teacher, student, images = block().eval(), block().eval(), torch.randn(6, 3, 4, 4)
    distillation = Distillation(teacher, features={"0": 1.0})
    output = distillation.watching(student)(images)
    assert torch.equal(output["0"], student[0](images)) and torch.equal(output["logits"], student(images))
    assert Distillation(teacher).watching(student) is student
    assert not any(each._forward_hooks for model in (teacher, student) for each in model.modules())
    with pytest.raises(ValueError, match=r"features: Sequential has no module 'layer3'; modules are called 0, 0\.0"):
        Distillation(teacher, features={"layer3": 1.0})


def test_a_feature_of_zeros_divides_by_no_zero() -> None:
    silent, student = (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2))
    nn.init.zeros_(silent[0].weight)  # type: ignore[arg-type]
    nn.init.constant_(silent[0].bias, -1.0)  # type: ignore[arg-type]
    images = torch.randn(8, 4)
    for model in (silent, student):
        distillation = Distillation(silent, features={"1": 0.1})
        assert bool(distillation(distillation.watching(model)(images), images).isfinite())


REFUSED = {
    "features: {'9': 1.0}": "features: Sequential has no module '9'",
    "teacher: {name: resnet18}": "teacher: resnet18 has no weights; set checkpoint or weights of it",
    "teacher: {name: 'tinymodels:flat'}": "the teacher does not fit the model (RuntimeError: ",
    "features: {'0': 1.0}, teacher: {name: 'tinymodels:tiny', kwargs: {channels: 12}}": (
        "0: the teacher's are (2, 12, 16, 16), the student's (2, 8, 16, 16)"
    ),
}


@pytest.mark.parametrize(("distillation", "said"), REFUSED.items())
def test_what_teaches_nothing_is_refused_before_any_training(
    distillation: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, "run_dir=run", f"qat.distillation={{{distillation}}}")
    assert error.startswith("qat.distillation") and said in error


def test_a_run_that_learned_needs_its_teacher_no_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exported again, or evaluated, it does not learn; trained on, it does."""
    assert start("run_dir=large", "qat.epochs=0", "model.kwargs={channels: 12}") == 0
    teacher = "name: 'tinymodels:tiny', kwargs: {channels: 12}, checkpoint: 't.safetensors'"
    (folder / "large" / "float.safetensors").rename(folder / "t.safetensors")
    run = ["run_dir=run", "resume=auto", f"qat.distillation={{teacher: {{{teacher}}}}}"]
    assert start(*run) == 0
    (folder / "t.safetensors").rename(folder / "moved.safetensors")
    assert start(*run, "export.onnx=true") == 0
    assert (folder / "run" / "model.onnx").exists()
    capsys.readouterr()
    assert start(*run, "qat.epochs=3") == 2
    assert capsys.readouterr().err.startswith("qat.distillation.teacher: model.checkpoint: 't.safetensors' does not")


def test_what_aids_add_to_the_loss_has_its_curves(folder: Path) -> None:
    """The loss of the labels is drawn apart from them."""
    aids = "qat.distillation={weight: 1000}", "qat.oscillation={dampen: 10.0, after: 0.5}"
    assert start("run_dir=run", *aids, "quantization.weight.bits=2") == 0
    drawn = curves(folder / "run")
    assert [step for step, _ in drawn["qat/train/distillation_loss"]] == [step for step, _ in drawn["qat/train/loss"]]
    assert all(value > 0.05 for _, value in drawn["qat/train/distillation_loss"])
    assert drawn["qat/train/dampening_loss"][0][1] == 0 < drawn["qat/train/dampening_loss"][-1][1]
    assert all(value < 10 for _, value in drawn["qat/train/loss"])
