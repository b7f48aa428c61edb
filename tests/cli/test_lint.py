"""`python -m qat lint`: what it says, and its status."""

from collections.abc import Callable
from pathlib import Path

Verb = Callable[..., tuple[int, str, str]]


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
