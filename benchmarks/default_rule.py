"""Which rule should be the default? ResNet-20 on CIFAR-10 from published weights, the same short fine-tuning for all.

    python -m benchmarks.default_rule --data cifar10.npz --weights cifar10_resnet20.safetensors
    python -m benchmarks.document         # docs/measurements.md's tables from what is kept

Every run appends a line to benchmarks/results/default_rule.jsonl; runs that are there already are not repeated.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import qat
from benchmarks.cifar_resnet import resnet20
from qat.quantizer import Quantizer

RESULTS = Path(__file__).resolve().parent / "results" / "default_rule.jsonl"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH, CALIBRATION = 128, 512

SYMMETRIC = {"signed": True, "symmetric": True}
FLOAT = "float, fine-tuned alike"
RULES: dict[str, dict[str, Any]] = {
    FLOAT: {},
    "lsq, factor per sample": {},
    "lsq, factor per sample, scales at 0.1 lr": {"quantizer_lr": 0.1},
    "lsq, factor per batch": {"both": {"grad_scale": "batch"}},
    "lsq, no factor": {"both": {"grad_scale": "none"}},
    "lsq, relative factor": {"both": {"grad_scale": "relative"}},
    "lsq_plus activations": {"activation": {"rule": "lsq_plus"}},
    "lsq with EWGS (delta 0.1)": {"both": {"ewgs": "fixed", "ewgs_delta": 0.1}},
    "minmax": {"weight": {"rule": "minmax", "init": "minmax"}, "activation": {"rule": "minmax"}},
    "ema": {"weight": {"rule": "minmax", "init": "minmax"}, "activation": {"rule": "ema"}},
    "dorefa weights, pact activations": {"weight": {"rule": "dorefa"}, "activation": {"rule": "pact"}},
    "dsq": {"both": {"rule": "dsq"}},
    "power_of_two": {"both": {"rule": "power_of_two"}},
}
"""What differs from LSQ as published: specs of weights, activations or both, and the scales' share of the lr."""

SETTINGS: dict[int, dict[str, Any]] = {
    8: {"lr": 1e-3, "steps": 40},
    4: {"lr": 1e-2, "steps": 80},
    2: {"lr": 2e-2, "steps": 120},
}
"""Bits -> peak learning rate (SGD, momentum 0.9, cosine) and steps of 128 images."""


def recipe(rule: str, bits: int) -> qat.QuantRecipe:
    """The rule at these bits; the first and the last layer have LSQ's 8 bits, their inputs too."""
    given = RULES[rule]
    both = given.get("both", {})
    weight = {"init": "mse", "bits": bits, **both, **given.get("weight", {})}
    if weight.get("rule") == "dorefa" and bits == 8:
        weight["bits"] = 7  # its 8 bits do not fit int8
    activation = {"bits": bits, **both, **given.get("activation", {})}
    plain = {"bits": 8, "rule": "lsq", "ewgs": "none"}
    ends = {"weight": plain, "activation": plain}
    return qat.QuantRecipe(weight, activation, overrides={"conv1": ends, "linear": ends})


def train(model: nn.Module, images: Tensor, labels: Tensor, bits: int, quantizer_lr: float, seed: int) -> list[float]:
    """Fine-tune; returns the loss of every step."""
    setting = SETTINGS[bits]
    scales = {id(p) for m in model.modules() if isinstance(m, Quantizer) for p in m.parameters()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in scales], "weight_decay": 1e-4},
        {"params": [p for p in model.parameters() if id(p) in scales], "lr": setting["lr"] * quantizer_lr},
    ]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=setting["lr"], momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting["steps"])
    generator = torch.Generator().manual_seed(seed)
    losses = []
    model.train()
    for step in range(setting["steps"]):
        qat.set_progress(model, step / setting["steps"])
        chosen = torch.randint(len(images), (BATCH,), generator=generator)
        batch = _augmented(images[chosen], generator)
        loss = F.cross_entropy(model(batch), labels[chosen])
        optimizer.zero_grad()
        (loss + qat.penalty(model)).backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Top-1 in percent, in evaluation mode: integer arithmetic where the rule has it."""
    model.eval()
    with torch.no_grad():
        right = [
            (model(x).argmax(1) == y).float().mean() for x, y in zip(images.split(250), labels.split(250), strict=True)
        ]
    return 100 * float(torch.stack(right).mean())


def run(rule: str, bits: int, seed: int, data: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Any]:
    """One row of the table."""
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = resnet20()
    model.load_state_dict(weights)
    prepared: nn.Module = model
    if rule != FLOAT:
        prepared = qat.prepare(model.eval(), recipe(rule, bits), data["x_train"][:2])
        qat.calibrate(prepared, data["x_train"][:CALIBRATION].split(128))
    before = accuracy(prepared, data["x_val"], data["y_val"])
    losses = train(prepared, data["x_train"], data["y_train"], bits, RULES[rule].get("quantizer_lr", 1.0), seed)
    floors = [int(m.scales_at_minimum() or 0) for m in prepared.modules() if isinstance(m, Quantizer)]
    return {
        "rule": rule,
        "bits": bits,
        "seed": seed,
        "calibrated": before,
        "qat": accuracy(prepared, data["x_val"], data["y_val"]),
        "loss": float(np.mean(losses[-20:])),
        "scales_on_floor": sum(floors),
        "seconds": time.perf_counter() - started,
        **SETTINGS[bits],
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": {"threads": torch.get_num_threads(), "cores": os.cpu_count()},
    }


def kept() -> list[dict[str, Any]]:
    """The results so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def rule_table(bits: int) -> str:
    """The rules at these bits in Markdown, means over the seeds, with the spread where there are several."""
    rows = [row for row in kept() if row["bits"] == bits]
    lines = [
        "| rule | seeds | calibrated top-1 % | QAT top-1 % | training loss, last 20 steps | scales on their floor |",
        "|---|---|---|---|---|---|",
    ]
    for rule in RULES:
        own = [row for row in rows if row["rule"] == rule]
        if own:
            figures = {name: [row[name] for row in own] for name in ("calibrated", "qat", "loss", "scales_on_floor")}
            lines.append(
                f"| {rule} | {len(own)} | {_spread(figures['calibrated'], 1)} | {_spread(figures['qat'], 1)} |"
                f" {_spread(figures['loss'], 3)} | {_spread(figures['scales_on_floor'], 0)} |"
            )
    if rows:
        setting, versions = SETTINGS[bits], rows[0]["versions"]
        lines += [
            "",
            f"{setting['steps']} steps of {BATCH} images, SGD with momentum 0.9, lr {setting['lr']:g} and cosine; torch"
            f" {versions['torch']}, Python {versions['python']}, {rows[0]['machine']['threads']} thread.",
        ]
    return "\n".join(lines) + "\n"


def _spread(values: list[float], digits: int) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def load(data: Path) -> dict[str, Tensor]:
    """Images normalised as the published weights want them."""
    mean, std = (torch.tensor(numbers).reshape(3, 1, 1) for numbers in (MEAN, STD))
    arrays = np.load(data)
    found = {name: torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_val", "y_val")}
    for name in ("x_train", "x_val"):
        found[name] = (found[name].permute(0, 3, 1, 2).float() / 255 - mean) / std
    return {name: tensor.long() if name.startswith("y") else tensor for name, tensor in found.items()}


def _augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Crop out of 4 pixels of padding, and mirror every second image."""
    padded = F.pad(images, (4, 4, 4, 4))
    top, left = torch.randint(9, (2,), generator=generator).tolist()
    crop = padded[:, :, top : top + 32, left : left + 32]
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], crop.flip(3), crop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 8, 2])
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    given = parser.parse_args()
    data, weights = load(given.data), load_file(given.weights)
    done = {(row["rule"], row["bits"], row["seed"]) for row in kept()}
    for seed in given.seeds:
        for bits in given.bits:
            for rule in given.rules:
                if (rule, bits, seed) in done:
                    continue
                row = run(rule, bits, seed, data, weights)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    {key: row[key] for key in ("rule", "bits", "seed", "calibrated", "qat", "loss", "seconds")},
                    flush=True,
                )


if __name__ == "__main__":
    main()
