"""What watching the quantizers costs: steps of the default config with `watch: off`, `scales` and `all`, in turns.

    python -m benchmarks.watch [--rounds N]

writes benchmarks/results/watch.json; `table` makes the sentence of docs/curves.md from it.
"""

import argparse
import copy
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import qat
from qat.training.config.file import load_config
from qat.training.data.loaders import load_data
from qat.training.loop.engine import Training
from qat.training.loop.evaluation import evaluate
from qat.training.loop.preparation import prepare_model
from qat.training.loop.stage import StageRun
from qat.training.loop.watching import looking
from qat.training.model.building import build_model
from qat.training.run.logging import RunLog
from qat.training.run.report import processor_name
from qat.training.script import CONFIGS

RESULT = Path(__file__).parent / "results" / "watch.json"
WAYS = ("off", "scales", "all")
CPU = torch.device("cpu")


def measure(rounds: int) -> dict[str, object]:
    """Median seconds of an epoch with its evaluation, and what watching adds as a share of its steps."""
    config = load_config("resnet_int8.yaml", [], CONFIGS)
    data = load_data(config.data, config.seed, CPU, config.channels_last)
    model = prepare_model(build_model(config.model, len(data.classes), with_weights=False), config, data.image_shape)
    qat.calibrate(model, data.calibration(2))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    steps: list[float] = []
    with tempfile.TemporaryDirectory(prefix="qat_watch_") as folder:
        trainings = {}
        for way in WAYS:
            run = StageRun(
                "qat", config.qat, config.model_copy(update={"watch": way}), copy.deepcopy(model), data.train, data.val,
                CPU, RunLog(Path(folder) / way), Path(folder),
            )  # fmt: skip
            trainings[way] = Training(run)
        for epoch in range(1 + rounds):
            for way, training in trainings.items():
                run, training.done = training.run, 0
                started = time.perf_counter()
                training.steps(0)
                stepped = time.perf_counter()
                with looking(run.config, run.model, run.log, run.name, epoch):
                    evaluate(run.model, run.val, CPU)
                if epoch:  # the first one builds and checks the fast way
                    times[way].append(time.perf_counter() - started)
                    steps.append(stepped - started)
    found = {way: median(each) for way, each in times.items()}
    return {
        "epoch_seconds": found,
        "of_steps": {way: 1 + (seconds - found["off"]) / median(steps) for way, seconds in found.items()},
        "rounds": rounds,
        "steps": len(data.train),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }


def table() -> str:
    """The sentence of docs/curves.md."""
    found = json.loads(RESULT.read_text())
    cost = {way: f"{100 * (share - 1):.1f} %" for way, share in found["of_steps"].items()}
    return (
        f"Measured on the default config (ResNet-18, {found['steps']} steps an epoch, the shortest that we have): `all`"
        f" adds {cost['all']} to the time of the steps, `scales` {cost['scales']}\n(medians of {found['rounds']} epochs"
        f" each, in turns; {found['processor']}, {found['threads']} threads).\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    found = measure(parser.parse_args().rounds)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(table())


if __name__ == "__main__":
    main()
