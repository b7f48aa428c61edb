"""The pictures of docs/curves.md: a healthy run of the digits, and runs made ill on purpose.

    python -m benchmarks.sick_runs [--out FOLDER]

trains each in FOLDER (some minutes), and copies the figures that show the illness, healthy and ill, to docs/pictures.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch

from qat.training import script
from qat.training.run import stages

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
SHORT = ["--config", "resnet_int8.yaml", "float.epochs=4", "qat.epochs=3", "float_finetune=true"]
HEALTHY = "healthy"
COLLAPSED = "layer2.0.conv2_quantizer"

ILL = {
    "fast_scales": ["qat.quantizer_lr_factor=100"],  # at 8 bits 0.1 is the default
    "collapsed": [],
    "unsettled": [
        "float.bn_reestimate=never",
        "qat.bn_reestimate=never",
        "data.batch_size=256",
        "float.epochs=3",
        "qat.lr=0.005",
        "qat.epochs=1",
    ],
    "two_bits": ["quantization.weight.bits=2", "quantization.activation.bits=2", "qat.lr=0.01"],
}
SHOWN = {
    "fast_scales": ("scales", "results"),
    "collapsed": ("scales", "errors"),
    "unsettled": ("batch_norm", "results"),
    "two_bits": ("oscillation", "errors"),
}


class Collapsing(stages.Stages):
    """Stages whose calibration loses one scale, as a step of an optimizer may."""

    def calibrate(self, model: torch.nn.Module) -> None:
        super().calibrate(model)
        quantizer = model.get_submodule(COLLAPSED)
        with torch.no_grad():
            quantizer.scale.mul_(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the runs stay; default: nowhere")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qat_sick_runs_") as place:
        folder = given.out or Path(place)
        for name, changes in {HEALTHY: [], **ILL}.items():
            script.Stages = Collapsing if name == "collapsed" else stages.Stages  # type: ignore[misc]
            if not (folder / name / "report.html").exists():
                script.main([*SHORT, *changes, f"run_dir={folder / name}"])
        PICTURES.mkdir(exist_ok=True)
        for name, figures in SHOWN.items():
            for run in (HEALTHY, name):
                for figure in figures:
                    shutil.copyfile(place_of(folder / run, figure), PICTURES / f"{run}_{figure}.png")


def place_of(run: Path, figure: str) -> Path:
    """A figure of a run as PNG."""
    return run / "results.png" if figure == "results" else run / "figures" / f"{figure}.png"


if __name__ == "__main__":
    main()
