"""`python -m qat verify`: the first layer that differs, and why; and `lint`, which looks at the file alone."""

import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper

from qat.cli import verify
from qat.cli.runs import Run
from qat.export import LayerDifference
from tests.cli.conftest import Verb


@pytest.fixture
def copied(pets: Path, tmp_path: Path) -> Path:
    """A copy of runs/pets whose file may be spoilt; its images are where they were."""
    shutil.copytree(pets / "runs" / "pets", tmp_path / "pets")
    return tmp_path / "pets"


def test_the_file_of_a_run_is_its_model(verb: Verb) -> None:
    status, out, err = verb("verify", "runs/pets")
    assert status == 0 and out.startswith("predictions: 100.00 % of 12 are equal; top1 "), err
    assert out.endswith("the file answers as the trained model\n")


def test_a_file_of_other_weights_is_named_as_such(copied: Path, verb: Verb) -> None:
    """One integer of one layer is another: the layer, the size of the difference, and the cause."""
    proto = onnx.load(copied / "model.onnx")
    node = next(node for node in proto.graph.node if node.name == "features.3.squeeze.weight")
    tensor = next(each for each in proto.graph.initializer if each.name == node.input[0])
    integers = numpy_helper.to_array(tensor).copy()
    integers.flat[0] = 127 if integers.flat[0] < 0 else -127
    tensor.CopyFrom(numpy_helper.from_array(integers, tensor.name))
    next(each for each in proto.metadata_props if each.key == "state_sha256").value = '"another"'
    onnx.save(proto, copied / "model.onnx")
    status, out, _ = verb("verify", str(copied), "--layers")
    assert status == 1 and "first layer beyond rounding: features.3.squeeze_quantizer, " in out
    assert "cause: the file is of other weights than the checkpoint: " in out
    assert out.endswith("the file is NOT the trained model\n") and "beyond ties" in out


def test_causes_are_told_apart(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near-ties, sums of 16 bits, and an optimisation of the runtime, each as its facts say."""
    opened, images = Run(pets / "runs" / "pets"), torch.zeros(2, 3, 48, 48)
    tie, far = (LayerDifference("features.3.squeeze_quantizer", 100, 3, 1, beyond) for beyond in (0, 3))
    assert verify.probable_cause(opened, tie, images, default_session=False).startswith("near-ties: ")
    monkeypatch.setenv("QAT_PROCESSOR", "no-vnni")
    said = verify.probable_cause(opened, far, images, default_session=True)
    assert said.startswith("this processor adds pairs of products in 16 bits (no VNNI), where ")
    said = verify.probable_cause(opened, far, images, default_session=False)
    assert said.startswith("an optimisation of ONNX Runtime: without its graph optimisation this layer is equal")
    fusion = replace(far, name="logits", fused=("first", "second"))
    said = verify.probable_cause(opened, fusion, images, default_session=False)
    assert said.startswith("an optimisation of ONNX Runtime, a fusion between first and second: without its graph")


def test_few_batches_are_the_first_ones_every_time() -> None:
    few = verify.FirstBatches([1, 2, 3], 2)
    assert (list(few), list(few), list(verify.FirstBatches([1, 2], None))) == ([1, 2], [1, 2], [1, 2])


def test_another_scale_is_a_file_that_computes_the_layer_otherwise(copied: Path, verb: Verb) -> None:
    proto = onnx.load(copied / "model.onnx")
    node = next(node for node in proto.graph.node if node.name == "features.3.squeeze_quantizer")
    tensor = next(each for each in proto.graph.initializer if each.name == node.input[1])
    scale = numpy_helper.from_array(numpy_helper.to_array(tensor) * 1.5, "another_scale")
    proto.graph.initializer.append(scale)
    node.input[1] = "another_scale"
    onnx.save(proto, copied / "model.onnx")
    status, out, _ = verb("verify", str(copied))
    assert status == 1 and "first layer beyond rounding: features.3.squeeze_quantizer, " in out
    assert "probable cause: the file computes this layer otherwise" in out


def test_the_file_of_a_run_is_clean_for_its_target_and_refused_by_another(verb: Verb) -> None:
    status, out, err = verb("lint", "runs/pets", "--for", "onnxruntime")
    assert status == 0 and out.endswith("model.onnx for onnxruntime: 0 errors, 0 warnings, 27 notes\n"), err + out
    status, out, _ = verb("lint", "runs/pets/model.onnx", "--for", "tensorrt")
    assert status == 1 and out.startswith("error: DequantizeLinear takes no int32 [int32-bias]\n  at ")
    assert ", and " in out and "  remedy: target='tensorrt'; quantize_static(" in out and "  source: https://" in out
    _, more, _ = verb("lint", "runs/pets/model.onnx", "--for", "tensorrt", "--all")
    assert ", and " not in more and len(more) > len(out)


def test_what_is_no_file_of_onnx_is_one_sentence(verb: Verb, tmp_path: Path) -> None:
    (tmp_path / "notes.onnx").write_text("no model")
    for file in ("notes.onnx", "nothing.onnx"):
        status, out, err = verb("lint", file, "--for", "openvino", place=tmp_path)
        assert (status, out, err.count("\n")) == (2, "", 1) and file in err
