"""The examples of docs/launchers: they parse, name what qat has, and run on two ranks where their packages are."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import qat

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ROOT / "docs" / "launchers"
LOOPS = sorted(path.name for path in LAUNCHERS.glob("*.py"))
SHELL = sorted(path.name for path in LAUNCHERS.iterdir() if path.suffix in (".sh", ".sbatch"))
ON_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
NODES = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
count = torch.ones(1)
dist.all_reduce(count)
sys.stdout.write(f"rank {dist.get_rank()} of {count.item():.0f}\\n")  # one write: the nodes share a pipe
sys.stdout.flush()
if sys.argv[1:] == ["fails"] and dist.get_rank() == 1:
    sys.exit(3)
time.sleep(600 if sys.argv[1:] else 0)
dist.destroy_process_group()
"""


def started(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it in the folder on CPUs, a thread for each rank."""
    given = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=200)


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_parses_and_names_what_qat_has(name: str) -> None:
    tree = ast.parse((LAUNCHERS / name).read_text())
    compile(tree, name, "exec")
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "qat"}
    assert used >= {"prepare", "calibrate", "sync_batch_norm", "parameter_groups", "export_onnx"}
    assert used <= set(qat.__all__)


@pytest.mark.parametrize("name", SHELL)
def test_a_script_parses(name: str) -> None:
    subprocess.run(["bash", "-n", str(LAUNCHERS / name)], check=True)


def test_a_slurm_job_whose_time_is_up_ends_its_ranks_and_starts_again(tmp_path: Path) -> None:
    """Slurm's commands are played: the step saves on the signal, and the job is queued anew."""
    script(tmp_path / "scontrol", f'echo "$*" >> {tmp_path}/asked; echo node-1')
    script(tmp_path / "scancel", f'echo "$*" >> {tmp_path}/asked; kill -USR1 "$(cat {tmp_path}/step)"')
    script(
        tmp_path / "srun",
        f"""
        trap 'sleep 0.5; echo saved >> {tmp_path}/asked; exit 1' USR1
        echo "$*" > {tmp_path}/started; echo $$ > {tmp_path}/step.new; mv {tmp_path}/step.new {tmp_path}/step
        for _ in $(seq 300); do sleep 0.1; done""",
    )
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    given = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shell = subprocess.Popen(["bash", str(LAUNCHERS / "slurm.sbatch"), "--config", "one.yaml"], env=given)
    for _ in range(300):
        if (tmp_path / "step").exists():
            break
        time.sleep(0.1)
    shell.send_signal(10)
    assert shell.wait(timeout=60) == 1
    asked = ["show hostnames node-[1-2]", "--signal=USR1 7", "saved", "requeue 7"]
    assert (tmp_path / "asked").read_text().splitlines() == asked
    said = (tmp_path / "started").read_text()
    assert "--nnodes 2 --nproc-per-node 8" in said and "node-1:20007" in said
    assert said.endswith("train.py --config one.yaml resume=auto\n")


@pytest.mark.slow
def test_a_slurm_job_trains_and_is_not_queued_again(tmp_path: Path) -> None:
    """With torchrun's own launcher, which has to know the options."""
    script(tmp_path / "scontrol", f'echo "$*" >> {tmp_path}/asked; echo localhost')
    script(tmp_path / "srun", 'shift; exec "$@"')
    script(tmp_path / "torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"')
    small = ["float.epochs=0", "qat.epochs=1", "data.limit_train=64", "data.limit_val=32", "device=cpu"]
    config = ["--config", "resnet_int8.yaml", f"run_dir={tmp_path}/run", "model.name=benchmarks.gpu_parts:Tiny", *small]
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = started(["bash", str(LAUNCHERS / "slurm.sbatch"), *config], ROOT, PATH=path, **job)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "asked").read_text() == "show hostnames localhost\n"


@pytest.mark.slow
def test_two_nodes_find_each_other_and_fail_together(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(NODES)
    command = [str(LAUNCHERS / "two_nodes.sh"), "ranks.py"]
    done = started(command, tmp_path, PYTHON=sys.executable, LIMIT="100")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    assert started([*command, "fails"], tmp_path, PYTHON=sys.executable, LIMIT="100").returncode == 1
    assert started([*command, "hangs"], tmp_path, PYTHON=sys.executable, LIMIT="15").returncode == 124


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "loop", "command"),
    [
        ("accelerate", "accelerate_loop.py", ON_RANKS),
        ("lightning", "fabric_loop.py", ON_RANKS),
        ("ray.train", "ray_train.py", [sys.executable]),
    ],
)
def test_a_loop_trains_on_two_ranks_and_exports(package: str, loop: str, command: list[str], tmp_path: Path) -> None:
    pytest.importorskip(package, reason="in the [launchers] extra")
    home = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "disabled"} if package == "ray.train" else {}
    done = started([*command, str(LAUNCHERS / loop)], tmp_path, ACCELERATE_USE_CPU="true", **home)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert ("group of size 2" in said) if home else ("rank 0 of 2" in said and "rank 1 of 2" in said)
    assert (tmp_path / "model.onnx").stat().st_size > 1000
