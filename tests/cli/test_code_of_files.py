"""No verb imports code because a run folder names it, whichever key of its config does."""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

import qat
from qat.cli.command import VERBS
from qat.training import script
from qat.training.config.file import parse_yaml
from qat.training.config.schema import RunConfig
from tests.cli.conftest import Verb
from tests.cli.test_verbs import ON_A_RUN
from tests.runs.tiny_training import Patch

CODE = "spy:build"
SCHEMA = RunConfig.model_json_schema()


def trees_of(node: Any) -> Iterator[Any]:
    """For each key of the schema that takes free text, the part of a config that names code there."""
    if "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    if node.get("type") == "string" and "enum" not in node:
        yield CODE
    for each in node.get("anyOf", []):
        yield from trees_of(each)
    for key, each in node.get("properties", {}).items():
        yield from ({key: tree} for tree in trees_of(each))
    if more := node.get("additionalProperties"):
        yield from ({"conv": tree} for tree in trees_of(more if isinstance(more, dict) else {"type": "string"}))
    if "items" in node:
        yield from ([tree] for tree in trees_of(node["items"]))


def merged(config: Any, tree: Any) -> Any:
    return (
        {**config, **{k: merged(config.get(k) or {}, v) for k, v in tree.items()}} if isinstance(tree, dict) else tree
    )


def test_every_key_that_trains_code_is_no_code_for_a_verb(
    own: Path, verb: Verb, tmp_path: Path, monkeypatch: Patch
) -> None:
    place = Path(shutil.copytree(own, tmp_path / "own"))
    (place / "spy.py").write_text("build = None")
    Image.new("RGB", (16, 16)).save(place / "x.png")
    file, checkpoint = place / "runs/own/config.yaml", place / "runs/own/last.pt"
    config, payload = parse_yaml(file.read_text()), torch.load(checkpoint)
    monkeypatch.setattr(script.files, "open_run_folder", None)  # training ends before it begins
    found = []
    for tree in trees_of(SCHEMA):
        file.write_text(json.dumps(merged(config, tree)))
        verb("train", str(file), place=place)
        if sys.modules.pop("spy", None) is None:
            continue
        found.append(*tree)
        torch.save({**payload, "config": merged(payload["config"], tree)}, checkpoint)
        builder = [] if "model" in tree else ["--model", "tinymodels:tiny"]
        for name in {*VERBS} - {"train", "lint"}:
            words = [*ON_A_RUN[name], *builder] if name in ON_A_RUN else ["runs/own"] * (name == "compare")
            (place / "x.onnx").unlink(missing_ok=True)
            status, _, err = verb(name, "runs/own", *words, place=place)
            refused = status == 2 and "no code is imported because a file names it; add --" in err
            assert status == 0 or (refused and len(err.splitlines()) == 1), (name, tree, err)
            assert "spy" not in sys.modules, (name, tree)
        with contextlib.suppress(ValueError):
            qat.load(place / "runs/own", nn.Identity())
        assert "spy" not in sys.modules
    assert found == ["imports", "model", "data", "qat"]
    file.write_text(json.dumps(merged(config, {"data": {"name": CODE}})))
    given = ["evaluate", "runs/own", "--model", "tinymodels:tiny", "--import"]
    said = (
        f"data.name: '{CODE}' is code of your own, and no code is imported because a file names it; add --import {CODE}"
    )
    assert verb(*given, "spy", place=place)[2] == f"{said}\n"
    assert verb(*given, CODE, place=place)[2] == f"data.name: '{CODE}' is NoneType; it must be callable\n"
