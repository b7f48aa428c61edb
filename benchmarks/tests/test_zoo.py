"""The zoo benchmark: whatever happens to a model is reported in its row, and the verdict names it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qat
from benchmarks import zoo_age, zoo_case
from benchmarks.work import Place
from benchmarks.zoo import Bounds, chosen, measured
from benchmarks.zoo_models import FAMILIES, Case, family_of, names_of
from benchmarks.zoo_runtime import Part, agreement, beyond, gap, parts_of, same_largest
from benchmarks.zoo_table import STEPS, verdict
from qat.export.onnxruntime.verification import LayerDifference

BOUNDS = Bounds(seconds=60, gib=8, threads=1)


class Small(nn.Module):
    """A convolution with BatchNorm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


class ByName(Small):
    """The same model, called and answering as those of transformers do."""

    def forward(self, pixel_values: Tensor | None = None, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        return {"loss": labels, "logits": super().forward(pixel_values)}


def case_of(model: nn.Module) -> Case:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    return Case(model.eval(), {"pixel_values": images} if isinstance(model, ByName) else (images,))


def test_all_names_of_torchvision_are_in_one_family() -> None:
    names = [name for family in FAMILIES for name in names_of(family)]
    assert len(names) == len(set(names)) >= 109
    one_of_each = ("vit_h_14", "fcn_resnet50", "ssd300_vgg16", "s3d", "raft_small")
    assert [family_of(name) for name in one_of_each] == list(FAMILIES)
    assert chosen(["vit"], "transformers") == ["transformers/vit"] and family_of("timm/resnet18") == "timm"
    assert chosen(["swin_?", "raft*"]) == ["swin_b", "swin_s", "swin_t", "raft_large", "raft_small"]
    with pytest.raises(ValueError, match=r"^--only resnet19: no model of torchvision is called so$"):
        chosen(["resnet19"])


@pytest.mark.parametrize("kind", [Small, ByName])
def test_a_green_row_has_every_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]) -> None:
    monkeypatch.setattr(zoo_case, "build", lambda name: case_of(kind()))
    row = zoo_case.measure("resnet18", tmp_path / "row.json")
    assert json.loads((tmp_path / "row.json").read_text()) == row
    assert verdict(row) == "green", verdict(row)
    steps = row["steps"]
    assert list(steps) == ["build", "prepare", "work", "calibrate", "train", "evaluate", "copy", "export", "runtime"]
    assert row["parameters"] == sum(p.numel() for p in Small().parameters()) and row["inputs"] == [[2, 3, 8, 8]]
    assert steps["prepare"]["quantized_layers"] == 2 and steps["prepare"]["whole"]
    assert steps["work"]["macs"] == 2 * (8 * 36 * 27 + 8 * 5) and steps["work"]["share"] == 1.0
    assert len(steps["train"]["losses"]) == 3 and len(set(steps["train"]["losses"])) == 3, "steps change the model"
    assert steps["evaluate"]["refused"] == {} and set(steps["evaluate"]["gaps"].values()) == {0.0}
    assert steps["build"]["result"] == steps["evaluate"]["result"] == ("dict" if kind is ByName else "Tensor")
    assert list(steps["evaluate"]["gaps"]) == ["the batch", "another batch", "a larger batch", "another size"]
    assert steps["copy"]["gaps"] == {"a copy": 0.0, "a pickle": 0.0, "a state dict": 0.0}
    assert steps["export"]["parts"] == 1
    assert steps["runtime"]["integers"] >= 2 * 3 * 64 and steps["runtime"]["arg_max_compared"] == 2


def test_a_failing_step_is_a_row_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_case, "build", lambda name: case_of(nn.ReLU()))
    row = zoo_case.measure("resnet18", tmp_path / "row.json")
    assert verdict(row) == "prepare: ValueError: prepare: ReLU has no layer to quantize"
    assert list(row["steps"]) == ["build", "prepare"]


def calibrated_with(float_model: nn.Module, x: Tensor) -> nn.Module:
    """The prepared model, calibrated with one batch."""
    model = qat.prepare(float_model.eval(), example_inputs=x)
    qat.calibrate(model, [x])
    return model


class Detached(nn.Module):
    """A model that cuts the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).detach()


def test_a_quantizer_without_a_gradient_and_values_that_are_not_finite_are_named() -> None:
    x = torch.randn(2, 3, 8, 8)
    model = calibrated_with(Small(), x)
    model.conv_quantizer = Detached(model.conv_quantizer)
    facts = zoo_case.train(model, Case(model, (x,)))
    assert not facts["ok"] and facts["not_finite"] == []
    assert "conv.weight_quantizer.scale" in facts["without_gradient"]
    assert "fc.weight_quantizer.scale" not in facts["without_gradient"]
    facts = zoo_case.train(model, Case(model, (x.fill_(float("nan")),)))
    assert not facts["ok"] and "fc.weight_quantizer.scale" in facts["not_finite"]


def test_a_reason_covers_the_modules_inside_and_untraceable_code_has_that_of_the_model() -> None:
    place = Place("encoder.attention.matmul_1", "matmul", 8, False)
    assert zoo_case.reason_for(place, {"encoder.attention": "because"}) == "because"
    assert zoo_case.reason_for(place, {"encoder.att": "because", "matmul_1": "no"}) is None
    reasons = {"(the model)": "cannot be traced"}
    assert zoo_case.reason_for(Place("", "RAFT", 8, False), reasons, {"head"}) == "cannot be traced"
    assert zoo_case.reason_for(Place("head", "Linear", 8, False), reasons, {"head"}) is None


WRITES = "import json, sys; json.dump({'steps': {'build': {'ok': True}}, 'running': 'train'}, open(sys.argv[-1], 'w'))"


@pytest.mark.parametrize(
    ("code", "bounds", "expected"),
    [
        (f"{WRITES}; import time; time.sleep(60)", Bounds(3, 8, 1), "train: took more than 3 s"),
        (f"{WRITES}; held = b'x' * 2**29; import time; time.sleep(60)", Bounds(60, 0.3, 1),
         "train: took more than 0.3 GiB"),
        (f"{WRITES}; import os; os.abort()", BOUNDS, "train: ended by signal 6"),
        ("raise SystemExit(3)", BOUNDS, "build: ended with status 3: nothing said"),
    ],
    ids=["time", "memory", "signal", "before the first row"],
)  # fmt: skip
def test_a_process_that_ends_early_is_a_row(code: str, bounds: Bounds, expected: str) -> None:
    row = measured("resnet18", bounds, [sys.executable, "-c", code])
    reached = {"build": {"ok": True}} if "train" in expected else {}
    failed = {expected.partition(":")[0]: {"ok": False, "reason": expected.partition(": ")[2]}}
    assert row["steps"] == reached | failed and "running" not in row
    assert (row["name"], row["family"], row["family_size"]) == ("resnet18", "classification", 80)


def test_the_verdict_is_the_first_thing_that_is_wrong() -> None:
    steps: dict[str, dict[str, Any]] = {step: {"ok": True} for step in STEPS}
    failed = {"ok": False, "reason": "ValueError: no"}
    unexplained = {"ok": True, "unexplained": 2, "in_float": [["head", "Linear", 9, None]]}
    assert verdict({"steps": steps}) == "green"
    assert verdict({"steps": steps | {"runtime": failed, "train": failed}}) == "train: ValueError: no"
    assert verdict({"steps": steps | {"work": unexplained, "train": failed}}) == (
        "work: 2 places compute in float without a reason, such as head (Linear)"
    )
    assert verdict({"steps": {"build": {"ok": True}}}) == "prepare: not reached"


def test_limits_of_agreement() -> None:
    def is_beyond(elements: int, off: int, largest: int = 1) -> bool:
        return beyond(LayerDifference("a", elements, off, largest, off))

    assert not is_beyond(10_000, 20) and is_beyond(10_000, 21) and is_beyond(50, 2) and is_beyond(10**6, 1100)
    assert not is_beyond(50, 1) and is_beyond(50, 1, largest=2)
    assert not beyond(LayerDifference("a", 50, 40, 1, 1))
    ours = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
    assert gap(ours, ours) == 0.0 and gap(ours, ours * float("nan")) == float("inf")
    off = torch.tensor([[0.0, 0.5], [0.0, 0.0]])
    assert gap(ours, ours + off) == pytest.approx(0.5 / ours.std(correction=0).item())
    assert same_largest(ours, torch.tensor([[2.0, 1.0], [4.0, 6.0]])).tolist() == [[False], [True]]


class InParts(nn.Module):
    """Two prepared parts with Python between; the second runs twice, and a third never."""

    def __init__(self) -> None:
        super().__init__()
        x = torch.randn(2, 3, 8, 8)
        row = x[:, 0, 0, :5]
        self.backbone = calibrated_with(Small(), x)
        self.head, self.spare = (calibrated_with(nn.Sequential(nn.Linear(5, 4)), row) for _ in range(2))

    def forward(self, images: list[Tensor]) -> list[Tensor]:
        features = self.backbone(x=torch.stack(images))
        first = self.head(features)
        features.zero_()  # tensors passed earlier must not change with it
        return [first, self.head(features)]


def test_parts_are_found_and_compared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = InParts()
    inputs = ([torch.randn(3, 8, 8), torch.randn(3, 8, 8)],)
    parts = parts_of(model, inputs)
    shapes = {part.name: [tuple(x.shape) for x in part.inputs] for part in parts}
    assert shapes == {"backbone": [(2, 3, 8, 8)], "head": [(2, 5)]}
    assert bool(parts[1].inputs[0].any())
    files: list[tuple[Part, Path]] = []
    facts: dict[str, Any] = {}
    zoo_case.export(model, inputs, tmp_path, files, facts)
    assert facts["ok"] and facts["parts"] == len(files) == 2
    same = agreement(files)
    assert same["ok"] and same["integers"] >= 2 * 3 * 64 + 10 and same["arg_max_compared"] == 4
    with torch.no_grad():
        model.head.get_submodule("0").weight.neg_()
    other = agreement(files)
    assert not other["ok"] and other["layers_beyond"] == 0


def test_the_oldest_rows_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ages = {"new": 0.0, "old": 9.0, "unknown": float("inf"), None: float("inf")}
    rows = [{"name": "vit_b_16", "commit": "new", "files_of": "old"}, {"name": "alexnet", "commit": "new"},
            {"name": "raft_small", "commit": "new", "files_of": "unknown"}]  # fmt: skip
    monkeypatch.setattr(zoo_age, "behind", ages.__getitem__)
    monkeypatch.setattr(zoo_age, "kept", lambda path: rows if path.name == "zoo.jsonl" else [])
    names = [name for _, name in zoo_age.oldest()]
    assert names[-3:] == ["raft_small", "vit_b_16", "alexnet"] and "resnet18" in names[:-3]
    monkeypatch.setattr(zoo_age, "same_code", lambda commit, part: commit == "new")
    assert zoo_age.said() == "of 3 rows are of this commit's code: capture 3, evaluation 3, export 1"
