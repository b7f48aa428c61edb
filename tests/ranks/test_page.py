"""The programs of docs/many_ranks.md run under torchrun, as they stand on the page."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "many_ranks.md").read_text()
PROGRAMS = {name: code for code, name in re.findall(r"^```python\n(# (my_\w+\.py)\n.*?)^```$", PAGE, re.M | re.DOTALL)}


def torchrun(name: str, count: int, folder: Path) -> str:
    """What a program of the page prints."""
    (folder / name).write_text(PROGRAMS[name])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--standalone", name]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as program:  # fmt: skip
        try:
            printed, _ = program.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)  # the ranks too
            raise
    assert program.returncode == 0, printed
    return printed


def test_the_page_has_both_programs() -> None:
    assert list(PROGRAMS) == ["my_ddp.py", "my_fsdp.py"]
    commands = re.findall(r"^torchrun --nproc-per-node \d (\w+\.py)", PAGE, re.MULTILINE)
    assert set(commands) == {*PROGRAMS, "train.py"}


def test_the_ddp_program_trains_and_exports(tmp_path: Path) -> None:
    assert "agreement=1.0" in torchrun("my_ddp.py", 2, tmp_path)
    assert (tmp_path / "ddp.onnx").exists()


def test_the_fsdp_program_trains_and_exports(tmp_path: Path) -> None:
    assert "agreement=1.0" in torchrun("my_fsdp.py", 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_the_fsdp_program_resumes_on_other_ranks(tmp_path: Path, count: int) -> None:
    assert "agreement=1.0" in torchrun("my_fsdp.py", 2, tmp_path)
    (tmp_path / "fsdp.onnx").unlink()
    assert "agreement=1.0" in torchrun("my_fsdp.py", count, tmp_path)
    assert (tmp_path / "fsdp.onnx").exists()
