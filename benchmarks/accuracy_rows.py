"""The rows of docs/accuracy.md: recipes of configs/, and baselines that get the same epochs, data and float weights."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

TORCH_AO = "torch.ao"


@dataclass(frozen=True)
class Row:
    """One row.

    Args:
        config: stem of a file of configs/, or torch.ao.
        bits: of weights and activations.
        epochs: of QAT in all.
        what: its name in the table.
        overrides: changes of the config, or arguments of benchmarks.accuracy_torch_ao.
        teacher: whether it learns from ResNet-56, whose weights `--teacher` names.
        own_float: whether its float weights are trained first, once for all rows and seeds of the config; false:
            `--weights`.
        held_out: whether it chooses between recipes, and so is validated on training images that are held out.
    """

    config: str
    bits: int
    epochs: int
    what: str
    overrides: tuple[str, ...] = ()
    teacher: bool = False
    own_float: bool = False
    held_out: bool = False


PLAIN_RATES = {8: 0.001, 4: 0.01, 3: 0.02, 2: 0.04}
"""SGD's for plain LSQ: at 4 and 8 bits the paper's, below it raised with the step (0.01 leaves 2 bits behind)."""


def _rows() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for bits in (8, 4, 3, 2):
        name = f"resnet20_cifar10_w{bits}a{bits}"
        compared = ("float_finetune=true",) if bits in (8, 4) else ()
        rows[name] = Row(name, bits, 6, "our recipe", compared)
        plain = ("qat.distillation=null", "qat.optimizer=sgd", f"qat.lr={PLAIN_RATES[bits]}")
        rows[f"{name}_plain"] = Row(name, bits, 6, "plain LSQ, SGD", plain)
        if bits < 8:
            low = (*plain, f"quantization.residual_bits={bits}")
            rows[f"{name}_low_residual"] = Row(name, bits, 6, "plain LSQ, residual stream at the same bits", low)
        if bits in (8, 4):
            rows[f"{name}_torch_ao"] = Row(TORCH_AO, bits, 6, "torch.ao, FX", ("--bits", str(bits), "--epochs", "6"))
        if bits < 8:
            rows[f"{name}_long"] = Row(name, bits, 30, "our recipe, long", ("qat.epochs=30",))
    binary = "resnet20_cifar10_w1a1"
    rows[binary] = Row(binary, 1, 30, "our recipe, first and last layer in float")
    four_times = ("qat.epochs=80", "qat.progressive=[{weight: {bits: 8, rule: lsq}, epochs: 40}]")
    rows[f"{binary}_long"] = Row(binary, 1, 120, "our recipe, long, first and last layer in float", four_times)
    return (
        rows
        | _with_aids("mobilenet_v2_cifar10_w4a4", "MobileNetV2", AIDS, held_out=True)
        | _with_aids("vit_cifar10_w4a4", "vision transformer", ["distillation"], held_out=False)
        | _with_rules()
    )


AIDS = {
    "distillation": "qat.distillation=null",
    "re-estimation": "qat.bn_reestimate=never",
    "freezing": "qat.oscillation.freeze=null",
}
"""What a recipe of a network with its own float training is compared without."""


def _with_aids(name: str, network: str, aids: Iterable[str], held_out: bool) -> dict[str, Row]:
    """A recipe of 4 bits and 3 epochs behind a float training of its own, and without each aid that it has."""
    common = {"own_float": True, "held_out": held_out}
    rows = {name: Row(name, 4, 3, f"{network}, our recipe", **common)}
    for aid in aids:
        rows[f"{name}_no_{aid.replace('-', '')}"] = Row(name, 4, 3, f"{network}, without {aid}", (AIDS[aid],), **common)
    if held_out:
        every = tuple(AIDS[aid] for aid in aids)
        rows[f"{name}_none"] = Row(name, 4, 3, f"{network}, without all of these", every, **common)
    return rows


def _both(key: str, value: str) -> tuple[str, ...]:
    return f"quantization.weight.{key}={value}", f"quantization.activation.{key}={value}"


RULES: dict[str, tuple[str, ...]] = {
    "lsq": (),
    "lsq, distillation": ("qat.distillation={amp: bf16}",),
    "lsq with EWGS (Hessian)": _both("ewgs", "hessian"),
    "dsq": _both("rule", "dsq"),
    "dorefa weights, pact activations": (
        "quantization.weight.rule=dorefa",
        "quantization.activation.rule=pact",
        "quantization.overrides.conv1.weight.rule=lsq",  # dorefa's 8 bits do not fit int8
        "quantization.overrides.linear.weight.rule=lsq",
    ),
    "power_of_two": _both("rule", "power_of_two"),
    "n2uq activations": (
        "quantization.activation.rule=n2uq",
        "quantization.activation.symmetric=true",
        "quantization.overrides.conv1.activation.rule=lsq",  # the images are negative in part
        "quantization.overrides.conv1.activation.symmetric=false",
    ),
}
"""Rules that docs/default_rule.md compares over five epochs of the recipes, and what they change there."""


def _with_rules() -> dict[str, Row]:
    """Every rule at 4, 3 and 2 bits, with the optimizer and the rate of the recipe of these bits."""
    rows = {}
    for rule, overrides in RULES.items():
        for bits in (4, 3, 2):
            changes = ("qat.distillation=null", "qat.epochs=5", "export.onnx=false", *overrides)
            name = f"w{bits}a{bits}_{'_'.join(re.findall('[a-z0-9]+', rule.lower()))}"
            rows[name] = Row(f"resnet20_cifar10_w{bits}a{bits}", bits, 5, rule, changes, held_out=True)
    return rows


ROWS = _rows()
"""Name of the run folder and of the result -> the row."""
