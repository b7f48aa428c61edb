"""What users do first, on one model of each kind of the zoo: steps, evaluation of other batches and sizes, copies."""

from pathlib import Path

import pytest
import torch
from torch import nn

import qat
from benchmarks.zoo_case import train
from benchmarks.zoo_evaluation import copies, evaluation
from benchmarks.zoo_models import build

KINDS = {
    "a classifier": "shufflenet_v2_x0_5",
    "a segmenter": "lraspp_mobilenet_v3_large",
    "a detector": "fasterrcnn_mobilenet_v3_large_320_fpn",
    "flow": "raft_small",
    "video": "r3d_18",
    "timm": "timm/mobilenetv3_small_100",
}


@pytest.mark.filterwarnings("ignore")  # the models' own
@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_the_first_things_work(name: str, tmp_path: Path) -> None:
    case = build(name)
    model: nn.Module = qat.prepare(case.model, example_inputs=case.inputs)
    torch.save(model, tmp_path / "fresh.pt")
    qat.calibrate(model, [(case.inputs,)])
    assert train(model, case)["ok"]
    model.zero_grad(set_to_none=True)
    facts = evaluation(model.eval(), case.inputs)
    assert facts["ok"] and "another batch" in facts["gaps"], facts
    facts = copies(model, case.inputs, tmp_path / "fresh.pt")
    assert facts["ok"], facts
