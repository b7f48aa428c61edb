"""What a trained model costs and answers where it is deployed: in torch, ONNX Runtime, OpenVINO and LiteRT.

    python -m benchmarks.deployment evaluation                   # eval() and qat.convert against float, in torch
    python -m benchmarks.deployment onnxruntime --models resnet18 vit_b_16
    python -m benchmarks.deployment engines --weights FILE.safetensors --images FILE.npz --run RUN
    python -m benchmarks.deployment tflite --weights FILE.safetensors --images FILE.npz --quantizer PYTHON
    python -m benchmarks.document                                # writes the tables into docs/deploying.md

FILE.safetensors holds the float weights of benchmarks.cifar_resnet's ResNet-20, FILE.npz the images as `data.name: npz`
reads them, RUN is the folder of a finished run, PYTHON an interpreter that has ai-edge-quantizer. Times are of one
thread, interleaved in one process. Rows go to a file of JSON lines; those of the same comparison on the same kind of
processor go.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import deployment_engines, deployment_evaluation, deployment_onnxruntime, deployment_tflite
from benchmarks.deployment_rows import COMPARISON, RESULT, facts, said
from benchmarks.speed_rows import Row, keep

PARTS: dict[str, Callable[[Any], Iterator[list[Row]]]] = {
    "evaluation": deployment_evaluation.rows,
    "onnxruntime": deployment_onnxruntime.rows,
    "engines": deployment_engines.rows,
    "tflite": deployment_tflite.rows,
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("part", choices=PARTS)
    made.add_argument("--models", nargs="+", help="names in torchvision, instead of those of the part")
    made.add_argument("--batch", nargs="+", type=int, help="instead of those of the part")
    made.add_argument("--rounds", type=int, default=15, help="of every comparison, at most")
    made.add_argument("--seconds", type=float, default=60, help="of a comparison, after which no round starts")
    made.add_argument("--weights", type=Path, help="float weights of ResNet-20 for CIFAR-10")
    made.add_argument("--images", type=Path, help="an .npz file of CIFAR-10")
    made.add_argument("--run", type=Path, help="the folder of a finished run")
    made.add_argument("--engines", nargs="+", help="some of them, by the names in deployment_table.py")
    made.add_argument("--quantizer", type=Path, help="the interpreter that has ai-edge-quantizer")
    made.add_argument("--out", type=Path, default=RESULT, help="JSON lines")
    return made


def main(arguments: list[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    warnings.simplefilter("ignore")  # exporters' deprecations
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured = PARTS[given.part](given)
    while True:
        about = facts()
        rows = next(measured, None)
        if rows is None:
            break
        full = [{**row, **about} for row in rows]
        keep(full, given.out, (*COMPARISON, "variant") if given.part == "engines" else COMPARISON)
        for row in full:
            print(said(row), flush=True)


if __name__ == "__main__":
    main()
