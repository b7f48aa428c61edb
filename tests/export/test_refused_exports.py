"""What `export_onnx` cannot write, or has to look into, in a sentence with a way out that is tried here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import qat
from tests.export.test_export_layers import quantized
from tests.references.prepared_case import Plain, draw, refused

X = draw(4, 8)


def net(forward: Callable[..., Any]) -> Plain:
    return Plain(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 3))


def test_what_torch_cannot_export_is_one_line_of_its_reason(tmp_path: Path) -> None:
    model = quantized(net(lambda self, x: torch.linalg.eigvals(self.a(x).mT @ self.a(x)).real), X)
    with pytest.raises(ValueError, match=r"^export_onnx: torch.onnx cannot export Plain: [^\n\x1b]*eig[^\n\x1b]*$"):
        qat.export_onnx(model, tmp_path / "x.onnx", X)


@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel, torch.compile])
def test_what_torch_wraps_around_a_model_is_not_in_the_file(wrap: Callable[..., nn.Module], tmp_path: Path) -> None:
    model = quantized(net(lambda self, x: self.b(self.a(x).relu())), X)
    path = tmp_path / "x.onnx"
    qat.export_onnx(wrap(model), path, X)  # a warning that the batch is fixed would be an error here
    graph = onnx.load(path).graph
    assert "a_quantizer" in {output for node in graph.node for output in node.output}
    assert qat.verify_onnx(path, model, [X, draw(7, 8)]).agreement == 1


def test_a_place_where_no_file_can_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    for path, error, sentence in (
        (tmp_path / "none" / "x.onnx", FileNotFoundError, f"there is no folder '{tmp_path}/none' to write to; create it"
         " first"),
        (tmp_path, IsADirectoryError, f"'{tmp_path}' is a folder; give the file in it, such as model.onnx"),
    ):  # fmt: skip
        with refused(f"export_onnx: {sentence}", error):
            qat.export_onnx(nn.Identity(), path, X)
