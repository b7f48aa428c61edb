"""A wheel has all that `python -m qat` needs: trained from another folder, by a config's bare name."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from qat.kernels.cpu import compiler

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def built(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-c", BUILD, kind, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_wheel_from_the_source_distribution_trains_anywhere(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml needs it")
    source, site, elsewhere = (tmp_path / name for name in ("source", "site", "elsewhere"))
    shutil.copytree(ROOT / "qat", source / "qat", symlinks=True)
    shutil.copytree(ROOT / "configs", source / "configs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tarfile.open(built("build_sdist", source, tmp_path)) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for tree in (source, unpacked):
        wheel = built("build_wheel", tree, tmp_path)
        names = {name.removeprefix("qat/") for name in zipfile.ZipFile(wheel).namelist()}
        assert names >= {"py.typed", "training/data/digits.png", "training/data/digits.md"}
        assert names >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").iterdir()}
        assert names >= {f"kernels/cpu/{path.name}" for path in (ROOT / "qat" / "kernels" / "cpu").glob("*.[ch]")}
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()

    def train(*words: str) -> subprocess.CompletedProcess[str]:
        given = os.environ | {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "qat", "train", "--config", *words]
        return subprocess.run(command, cwd=elsewhere, env=given, capture_output=True, text=True)

    assert f"not found in {elsewhere} and {site}/qat/configs; there are: " in train("zz").stderr
    small = ["float.epochs=0", "qat.epochs=1", "data.limit_train=64", "data.limit_val=32", "device=cpu"]
    done = train("resnet_int8.yaml", *small)
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "runs" / "resnet_int8" / "model.onnx").exists()
    if compiler.library() is not None:
        assert list((tmp_path / "cache").rglob("*.so"))
