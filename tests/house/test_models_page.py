"""docs/models.md: its code runs, from top to bottom, and says what the text says."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import qat

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
        if "dry_run" in block:
            table = capsys.readouterr().out
            assert "encoder.layers.encoder_layer_0.self_attention.query_projection" in table and "stays float" in table
    assert capsys.readouterr().out.endswith(
        "['backbone', 'head']\n{'c3': torch.Size([2, 128, 8, 8]), 'c4': torch.Size([2, 256, 4, 4])}\n"
    )
    skipped = "encoder.layers.encoder_layer_0.self_attention.query_projection"
    model = names["model"]
    assert f"{skipped}  " in qat.summary(model) and not hasattr(
        model.get_submodule(skipped.rpartition(".")[0]), "query_projection"
    )
    assert model.get_submodule("conv_proj").weight_quantizer.spec.bits == 8
    assert model.get_submodule("heads.head").weight_quantizer.spec.bits == 8
    assert model.get_submodule("encoder.layers.encoder_layer_0.mlp.0").weight_quantizer.spec.bits == 4
