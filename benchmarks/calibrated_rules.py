"""What every rule does to a trained model before any training: ResNet-20 on CIFAR-10, published weights, calibrated.

    python -m benchmarks.calibrated_rules --data cifar10.npz --weights cifar10_resnet20.safetensors
    python -m benchmarks.document         # docs/rules.md's table from what is kept

Ten minutes on one thread; the results are kept in benchmarks/results/calibrated_rules.json.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import qat
from benchmarks.cifar_resnet import resnet20
from benchmarks.default_rule import load
from benchmarks.rules_table import ROLES, accepted
from qat.quantizer import create_quantizer, registered_quantizers
from qat.spec import Role, default_spec

RESULTS = Path(__file__).resolve().parent / "results" / "calibrated_rules.json"
BITS = (8, 4)
OWN_BITS = {"binary": (1,), "ternary": (2,), "ttq": (2,), "mxfp6": (6,), "mxfp4": (4,)}
PLAIN: dict[str, Any] = {"bits": 8, "rule": "lsq"}
CALIBRATION, IMAGES = 256, 500

FOR = {
    "apot": "weights in a bell: levels close together near 0; for hardware that shifts",
    "binary": "weights of one bit",
    "dorefa": "few bits without a learned range; activations above 1 are cut off, so it needs training behind",
    "dsq": "few bits, where a softer gradient helps; three times the time of `lsq`",
    "ema": "8 bits in the classic way; a range that outliers of one batch do not set",
    "fp8_e4m3": "to try what a GPU's fp8 would do; finer steps, less range",
    "fp8_e5m2": "the same; coarser steps, more range",
    "learned_bits": "to find how many bits each tensor needs",
    "lsq": "the default: any bits",
    "lsq_plus": "activations that are negative in part (swish, GELU) at few bits",
    "minmax": "8 bits, or a range that nothing learns",
    "mxfp4": "to try what accelerators of the MX formats would do",
    "mxfp6": "the same",
    "mxfp8": "the same",
    "mxint8": "the same",
    "n2uq": "few bits: levels that are unevenly far apart on the way in",
    "pact": "activations behind a ReLU at few bits",
    "power_of_two": "hardware that scales by shifts",
    "stacked_sigmoid": "a long training that hardens step by step",
    "ternary": "weights -1, 0, 1 with one scale, which the weights give",
    "ttq": "weights of three levels with two learned scales",
}
"""What a rule is for, in one line."""


def specs(rule: str, role: Role, bits: int) -> list[dict[str, Any]]:
    """The changes of the role's default that give the rule these bits, the nearest to the default first."""
    default = default_spec(role)
    flips = ("signed", "symmetric", "granularity")
    found = []
    for chosen in sorted(itertools.product((False, True), repeat=3), key=sum):
        change: dict[str, Any] = {"rule": rule, "bits": bits}
        for name, flip in zip(flips, chosen, strict=True):
            if flip:
                change[name] = "tensor" if name == "granularity" else not getattr(default, name)
        try:
            create_quantizer(default.changed(change), role)
            found.append(change)
        except ValueError:
            continue
    return found


def logits(model: nn.Module, images: Tensor) -> Tensor:
    """Answers in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(batch) for batch in images.split(250)])


def calibrated(model: nn.Module, change: dict[str, Any], role: Role, images: Tensor) -> nn.Module:
    """The model with the rule on its inner layers, on one side; all else is LSQ's 8 bits."""
    sides = {"weight": PLAIN, "activation": PLAIN, role: change}
    ends = {"weight": PLAIN, "activation": PLAIN}
    recipe = qat.QuantRecipe(**sides, overrides=dict.fromkeys(("conv1", "linear"), ends))
    prepared = qat.prepare(model, recipe, images[:2])
    qat.calibrate(prepared, images.split(128))
    return prepared


def measure(
    model: nn.Module, rule: str, role: Role, bits: int, data: dict[str, Tensor], expected: Tensor
) -> dict[str, Any] | None:
    """One cell, on the first grid that takes the model's tensors; None if there is none."""
    for change in specs(rule, role, bits):
        try:
            answers = logits(calibrated(model, change, role, data["x_train"][:CALIBRATION]), data["x_val"])
        except ValueError:
            continue
        top1 = 100 * float((answers.argmax(1) == data["y_val"]).float().mean())
        error = float((answers - expected).norm() / expected.norm())
        return {"rule": rule, "role": role, "bits": bits, "spec": change, "top1": top1, "error": error}
    return None


def learned(rule: str) -> str:
    """What the rule learns, over both roles, and the factor on the rate of what does not have that of its bits."""
    found = [each for quantizers in accepted(rule).values() for each in quantizers]
    names = sorted({name for each in found for name, _ in each.named_parameters()})
    factors = found[0].lr_factors
    return (
        ", ".join(f"`{name}`" + (f" ({factors[name]:g} lr)" if name in factors else "") for name in names) or "nothing"
    )


def calibrated_table() -> str:
    """The rules in Markdown, with what they do to the trained model at once."""
    kept = json.loads(RESULTS.read_text())
    cells: dict[tuple[str, str, bool], str] = {}
    for row in kept["rows"]:
        own = f", {row['bits']} bit{'s' * (row['bits'] > 1)}" if row["bits"] not in BITS else ""
        place = row["rule"], row["role"], row["bits"] > 4
        cells[place] = f"{row['top1']:.1f} ({100 * row['error']:.0f} %{own})"
    titles = ("rule", "what it is for", "weights at 8 bits", "at 4", "activations at 8 bits", "at 4", "learns")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for rule, use in FOR.items():
        measured = [cells.get((rule, role, many), "") for role in ROLES for many in (True, False)]
        lines.append(f"| `{rule}` | {use} | {' | '.join(measured)} | {learned(rule)} |")
    return "\n".join(lines) + (
        f"\n\nResNet-20 on CIFAR-10 from published weights, float {kept['float']:.1f} %: top-1 on {kept['images']} test"
        " images (differences below 3 points say nothing), in brackets the error of the logits, |y - float| / |float|."
        " The rule is on the weights or the activations of all layers but the first and the last, `lsq` at 8 bits on"
        f" all else; calibrated on {kept['calibration']} images, not trained; torch {kept['torch']}"
        " (`python -m benchmarks.calibrated_rules`).\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    data, model = load(given.data), resnet20()
    data |= {name: data[name][:IMAGES] for name in ("x_val", "y_val")}
    model.load_state_dict(load_file(given.weights))
    model.eval()
    rows: list[dict[str, Any]] = []
    expected = logits(model, data["x_val"])
    top1 = 100 * float((expected.argmax(1) == data["y_val"]).float().mean())
    for rule, role in itertools.product(registered_quantizers(), ROLES):
        for bits in OWN_BITS.get(rule, BITS):
            row = measure(model, rule, role, bits, data, expected)
            rows += [row] if row else []
            print(row or (rule, role, bits, "no"), flush=True)
    kept = {"float": top1, "images": IMAGES, "calibration": CALIBRATION, "torch": torch.__version__}
    RESULTS.write_text(json.dumps({**kept, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
