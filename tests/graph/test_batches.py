"""The batches that calibrate, verify_onnx and reestimate_batch_norm take, and the sentence for every other one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from qat.export import compare_layers
from qat.export.onnxruntime.session import open_session, run_session
from qat.graph.guards import expect_sizes
from tests.references.prepared_case import Plain

IMAGE = torch.linspace(-1, 3, 48).reshape(3, 4, 4)
IMAGES, LABELS = torch.stack([IMAGE, IMAGE / 2]), torch.tensor([0, 1])
FORM = "a batch must be a tensor, (inputs, labels), or a mapping of keyword arguments, got"
BATCHES = "batches must be a loader, a list of batches or a tensor, got"
RUN = "Sequential.forward(input) does not run with a batch of"


class Detector(nn.Module):
    """Takes a list of images, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = qat.QuantConv2d(3, 2, 3)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Tensor:
        assert all(image.dim() == 3 for image in images)
        if targets is not None:
            assert all(target.items() for target in targets)
        found: Tensor = self.layer(torch.stack(images))
        return found


def network() -> nn.Module:
    return nn.Sequential(qat.QuantConv2d(3, 2, 3), nn.BatchNorm2d(2))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("target", [{"boxes": IMAGE}, [{"bbox": [1, 2, 3, 4]}], []])
def test_a_loader_of_detection_data_gives_lists_of_images(count: int, target: Any) -> None:
    samples = [(IMAGE * (i + 1), target) for i in range(count)]
    model, expected = Detector(), Detector()
    loader = torch.utils.data.DataLoader(samples, count, collate_fn=lambda batch: tuple(zip(*batch)))  # noqa: B905
    qat.calibrate(model, loader)
    qat.calibrate(expected, [([image for image, _ in samples], target)])
    found, wanted = (each.layer.input_quantizer for each in (model, expected))
    assert found is not None and wanted is not None and torch.equal(found.scale, wanted.scale)


@pytest.mark.parametrize("labels", [LABELS, (LABELS,), (3, 5), ({"boxes": IMAGE},)])
def test_a_tuple_of_inputs_stays_arguments(labels: Any) -> None:
    model: Any = Plain(lambda self, x, y: self.layer(x + y), layer=qat.QuantLinear(3, 2))
    qat.calibrate(model, [((torch.ones(4, 3), torch.ones(4, 3)), labels)])
    assert model.layer.input_quantizer.is_calibrated


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        (3, f"{BATCHES} int"),
        ([IMAGES.numpy()], f"{FORM} ndarray (torch.from_numpy"),
        (["images"], f"{FORM} str"),
        ([(IMAGES.numpy(), LABELS)], f"{RUN} ndarray (torch.from_numpy"),
        ([{"image": IMAGES, "label": LABELS}], f"{RUN} {{image: float32 (2, 3, 4, 4), label: int64 (2,)}}"),
        ([[(IMAGE, IMAGE), ({}, {})]], f"{RUN} [float32 (3, 4, 4), float32 (3, 4, 4)]"),
        ([(IMAGES * 80).to(torch.uint8)], f"{RUN} uint8 (2, 3, 4, 4)"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(given: Any, fact: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refusal:
        qat.calibrate(network(), given)
    assert str(refusal.value).startswith(f"calibrate: {fact}") and "\n" not in str(refusal.value)


def test_a_model_without_values_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"^calibrate: Sequential is on the meta device and has no values; load the"):
        qat.calibrate(network().to("meta"), [IMAGES])


def test_other_errors_are_the_models_own() -> None:
    with pytest.raises(RuntimeError, match=r"^Given groups=1"):
        qat.calibrate(network(), [IMAGES[:, :2]])


def test_all_that_take_a_model_and_batches_read_the_same(tmp_path: Path) -> None:
    model, path, wrong = network().eval(), tmp_path / "model.onnx", {"image": IMAGES}
    qat.calibrate(model, IMAGES)
    qat.export_onnx(model, path, IMAGES)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (qat.calibrate, ()),
        (qat.reestimate_batch_norm, ()),
        (qat.verify_onnx, (path,)),
        (compare_layers, (path,)),
    ]
    for call, before in calls:
        with pytest.raises(TypeError, match=f"^{call.__name__}: model must be a torch.nn.Module, got list"):
            call(*before, [IMAGES], model)
        with pytest.raises(ValueError, match=rf"^{call.__name__}: .+ a batch of {{image: float32"):
            call(*before, model, wrong)


def test_a_batch_of_two_inputs_says_how_it_is_written() -> None:
    """Points 20 and 51: torch's raw TypeError, or the model's own words of a list."""
    x = torch.randn(3, 4)
    cure = r"; \(\(x, y\), labels\) is a batch of two inputs, \(\[x, y\], labels\) of one that is a list$"
    model = qat.prepare(Plain(lambda self, x, y: self.a(x) + y, a=nn.Linear(4, 4)), example_inputs=(x, x))
    for each, batch, said in (
        (model, (x, x), r"Plain.forward\(x, y\) does not run with .* 'y'"),
        (Detector(), [IMAGES, IMAGES], r"Detector.forward\(images, targets\) does not run with .*"),
    ):
        with pytest.raises(ValueError, match=f"^calibrate: {said}{cure}"):
            qat.calibrate(each, [batch])
    qat.calibrate(model, [((x, x),)])


def test_a_long_condition_on_sizes_is_said_in_words() -> None:
    with pytest.raises(ValueError, match=r"^the model was prepared for inputs whose sizes lead its forward the way"):
        expect_sizes([torch.ones(1, 3)], ("x",), (" + ".join(["s[0][1]"] * 20) + " == 1",))


@pytest.mark.parametrize(("decides", "broken"), [
    (lambda n: n > 1, r"x.shape\[0\] > 1"), (lambda n: n % 2 == 0, "% 2"), (lambda n: n == 4, r"x.shape\[0\] == 4"),
])  # fmt: skip
def test_a_file_takes_no_batch_that_the_model_refuses(decides: Any, broken: str, tmp_path: Path) -> None:
    net = Plain(lambda self, x: self.a(x) - x.mean(0) if decides(x.shape[0]) else self.a(x), a=nn.Linear(4, 4))
    model, x = qat.prepare(net.eval(), example_inputs=torch.randn(4, 4)), torch.randn(4, 4)
    qat.calibrate(model, [x])
    with pytest.warns(UserWarning, match=f"^export_onnx: the batch is fixed at that of example_inputs, .*{broken}"):
        qat.export_onnx(model, tmp_path / "model.onnx", x)
    with pytest.raises(ValueError, match="does not run"):
        run_session(open_session(tmp_path / "model.onnx"), x[:1])
