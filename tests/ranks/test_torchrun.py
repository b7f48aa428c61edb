"""`torchrun train.py`, which ends as one and goes on after any end; and the programs of docs/many_ranks.md."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import train as script
from qat.training.run.checkpoint import load_checkpoint
from tests.runs.finished_runs import TINY_MODEL
from tests.runs.small_run import standing_in

CONFIG = """
model: {name: 'tinymodels:tiny'}
data: {name: digits, image_size: 12, batch_size: 32, limit_train: 480, limit_val: 101, workers: 0}
float: {epochs: 2, lr: 0.05}
qat: {epochs: 3, lr: 0.02, ema_decay: 0.9}
checkpoint_every: 4
sync_batch_norm: true
log_every: 3
watch: "off"
device: cpu
"""
FAILING = """
import os
from qat.training.data.datasets import build_dataset

def fail(where):
    if os.environ["FAIL"] == where and os.environ["RANK"] == os.environ["FAILS"]:
        from qat.training.errors import UserError
        raise UserError(f"rank {os.environ['RANK']} cannot go on in {where}")

def digits(config):
    fail("data loading")
    return build_dataset(config.model_copy(update={"name": "digits"}), 0)

import qat
from qat.training.run import stages
from qat.training.loop import engine

def before(module, name, where, stage=None):
    real = getattr(module, name)
    def checked(*given, **named):
        fail(where)
        return real(*given, **named)
    setattr(module, name, checked)

before(qat, "calibrate", "calibration")
before(engine, "evaluate", "evaluation")
before(stages, "export_and_prove", "export")
"""
FILES = {"tinymodels.py": TINY_MODEL, "failing.py": FAILING, "tiny.yaml": CONFIG}
ROOT = Path(script.__file__).resolve().parent
Process: TypeAlias = "subprocess.Popen[str]"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with standing_in(tmp_path, FILES):
        yield tmp_path


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]


def launch(folder: Path, words: list[str], stdout: int = subprocess.PIPE, **environment: str) -> Process:
    """Begin Python with these words in a process of its own."""
    more = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    pipes: dict[str, Any] = {"stdout": stdout, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=os.environ | more, start_new_session=True, **pipes
    )


def start(folder: Path, *arguments: str, ranks: int = 0, restarts: int = 0, **options: Any) -> Process:
    """Begin `train.py`, under torchrun on so many ranks if there are any."""
    launcher = [*torchrun(ranks), f"--max-restarts={restarts}"] if ranks else []
    return launch(folder, [*launcher, str(ROOT / "train.py"), "tiny.yaml", *arguments], **options)


def end(process: Process, limit: float = 200) -> tuple[int, str]:
    """The exit status and what was printed; nothing is left running."""
    try:
        said = process.communicate(timeout=limit)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


def wait_for(path: Path, process: Process) -> None:
    limit = time.monotonic() + 120
    while not path.exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.02)


def wait_for_another(path: Path, process: Process) -> None:
    before, limit = path.stat().st_ino, time.monotonic() + 120
    while path.stat().st_ino == before and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.02)


def weights(run: Path) -> dict[str, Any]:
    payload = load_checkpoint(run / "last.pt")
    return {"model": payload["model"], "ema": payload["state"]["ema"]}


def assert_same_weights(run: Path, other: Path) -> None:
    torch.testing.assert_close(weights(run), weights(other), rtol=0, atol=0)


def ranks_of(launcher: int) -> list[int]:
    """The processes that torchrun has started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def test_a_signal_ends_all_ranks_after_a_step_and_the_run_goes_on_from_there(folder: Path) -> None:
    first = start(folder, "run_dir=run", "qat.epochs=300", ranks=2)
    wait_for(folder / "run" / "best.pt", first)
    first.send_signal(signal.SIGTERM)
    status, said = end(first, 60)
    assert status and said.count("ended by SIGTERM; resume=auto goes on from the last checkpoint") == 1
    assert "2 ranks: a batch (data.batch_size) has 32 images, 16 on each rank" in said
    payload = load_checkpoint(folder / "run" / "last.pt")
    assert payload["stage"] == "qat" and len(payload["state"]["rng"]) == 2
    done = payload["epochs"], payload["state"]["step"]
    later = start(folder, "run_dir=run", "qat.epochs=300", "resume=auto")  # on another number of ranks
    wait_for_another(folder / "run" / "last.pt", later)
    later.send_signal(signal.SIGUSR1)
    status, said = end(later, 60)
    assert status == 128 + signal.SIGUSR1 and said.endswith(
        "ended by SIGUSR1; resume=auto goes on from the last checkpoint\n"
    )
    assert f"qat: going on after epoch {done[0]} of 300" in said
    payload = load_checkpoint(folder / "run" / "last.pt")
    assert (payload["epochs"], payload["state"]["step"]) > done


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("where", ["data loading", "calibration", "evaluation", "export"])
def test_an_error_on_one_rank_ends_all_with_its_sentence(where: str, rank: str, folder: Path) -> None:
    own = ("imports=[failing]", "data.name=failing:digits")
    process = start(folder, "run_dir=run", *own, ranks=2, FAIL=where, FAILS=rank)
    status, said = end(process, 120)
    exported_by_all = where == "export" and rank == "1"  # rank 0 exports alone
    assert said.count(f"rank {rank} cannot go on in {where}\n") == (0 if exported_by_all else 1)
    assert bool(status) is not exported_by_all and "Connection closed" not in said


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_killed_rank_costs_nothing_but_time(folder: Path) -> None:
    assert end(start(folder, "run_dir=whole", ranks=2))[0] == 0
    random.seed(0)
    number = kills = 0
    while kills < 10:
        number += 1
        process = start(folder, f"run_dir=run{number}", ranks=2, restarts=3)
        wait_for(folder / f"run{number}" / "config.yaml", process)
        time.sleep(random.uniform(0, 8))
        if ranks := ranks_of(process.pid):
            os.kill(random.choice(ranks), signal.SIGKILL)
            kills += 1
        assert end(process)[0] == 0
        assert_same_weights(folder / f"run{number}", folder / "whole")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_killed_process_goes_on_from_its_last_checkpoint(folder: Path) -> None:
    began = time.monotonic()
    assert end(start(folder, "run_dir=whole"))[0] == 0
    usual, kills, runs = time.monotonic() - began, 0, 0
    random.seed(0)
    while kills < 50:
        runs += 1
        while True:
            process = start(folder, f"run_dir=run{runs}", "resume=auto", stdout=subprocess.DEVNULL)
            try:
                process.wait(random.uniform(0, usual) if kills < 50 else 200)
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                kills += 1
        assert process.returncode == 0
        assert_same_weights(folder / f"run{runs}", folder / "whole")


PAGE = (ROOT / "docs" / "many_ranks.md").read_text()
PROGRAMS = {name: code for code, name in re.findall(r"^```python\n(# (my_\w+\.py)\n.*?)^```$", PAGE, re.M | re.DOTALL)}


def printed(name: str, count: int, folder: Path) -> str:
    """What a program of docs/many_ranks.md prints on so many ranks."""
    (folder / name).write_text(PROGRAMS[name])
    status, said = end(launch(folder, [*torchrun(count), "--standalone", name], PYTHONPATH=str(ROOT)))
    assert status == 0, said
    return said


def test_the_page_has_both_programs() -> None:
    assert list(PROGRAMS) == ["my_ddp.py", "my_fsdp.py"]
    commands = re.findall(r"^torchrun --nproc-per-node \d (\w+\.py)", PAGE, re.MULTILINE)
    assert set(commands) == {*PROGRAMS, "train.py"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_program_of_the_page_trains_and_exports(kind: str, tmp_path: Path) -> None:
    assert "agreement=1.0" in printed(f"my_{kind}.py", 2, tmp_path)
    assert (tmp_path / f"{kind}.onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_the_fsdp_program_resumes_on_other_ranks(tmp_path: Path, count: int) -> None:
    assert "agreement=1.0" in printed("my_fsdp.py", 2, tmp_path)
    (tmp_path / "fsdp.onnx").unlink()
    assert "agreement=1.0" in printed("my_fsdp.py", count, tmp_path)
    assert (tmp_path / "fsdp.onnx").exists()
