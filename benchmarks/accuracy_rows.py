"""The rows of docs/measurements.md: recipes of configs/, and baselines with the same epochs, data and weights."""

import re
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
        beside: the row that it is compared with, image by image.
        size: what `python -m qat bits --size` gets, which then chooses the bits of each layer; 0: they are uniform.
    """

    config: str
    bits: int
    epochs: int
    what: str
    overrides: tuple[str, ...] = ()
    teacher: bool = False
    own_float: bool = False
    held_out: bool = False
    beside: str = ""
    size: int = 0


PLAIN_RATES = {8: 0.001, 4: 0.01, 3: 0.02, 2: 0.04}
"""SGD's for plain LSQ: at 4 and 8 bits the paper's, below it raised with the step (0.01 leaves 2 bits behind)."""

BRECQ = "quantization.calibration_steps=[{name: brecq}]"
TRAINED = ("qat.epochs=6", "export.onnx=true")  # bits.yaml is the config of a run that only calibrates
CHOSEN = "bits of each layer as `python -m qat bits` chooses them at the same size"


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
            short = (*plain, "qat.epochs=2")
            rows[f"{name}_short"] = Row(name, bits, 2, "plain LSQ, SGD", short)
            begun = Row(name, bits, 2, "plain LSQ, SGD, begun with BRECQ", (*short, BRECQ), beside=f"{name}_short")
            rows[f"{name}_short_brecq"] = begun
            if bits > 2:
                what = f"plain LSQ, SGD, {CHOSEN}"
                chosen = Row(name, bits, 2, what, (*TRAINED, *short), beside=f"{name}_short", size=bits)
                rows[f"{name}_short_bits"] = chosen
        if bits == 4:
            rows[f"{name}_bits"] = Row(name, bits, 6, f"our recipe, {CHOSEN}", TRAINED, beside=name, size=bits)
        if bits in (8, 4):
            rows[f"{name}_torch_ao"] = Row(TORCH_AO, bits, 6, "torch.ao, FX", ("--bits", str(bits), "--epochs", "6"))
        if bits < 8:
            rows[f"{name}_long"] = Row(name, bits, 30, "our recipe, long", ("qat.epochs=30",))
    binary = "resnet20_cifar10_w1a1"
    rows[binary] = Row(binary, 1, 30, "our recipe, first and last layer in float")
    four_times = ("qat.epochs=80", "qat.progressive=[{weight: {bits: 8, rule: lsq}, epochs: 40}]")
    rows[f"{binary}_long"] = Row(binary, 1, 120, "our recipe, long, first and last layer in float", four_times)
    return rows | _with_own_float() | _with_rules()


CONSTANT = "qat.schedule=constant"
"""Without a rate that ends at 0, weights jump between integers to the end, as in loops that have no schedule."""

DEPTHWISE = {
    "": ("our recipe", "", ()),
    "_no_distillation": ("without distillation", "", ("qat.distillation=null",)),
    "_no_freezing": ("without freezing", "", ("qat.oscillation=null",)),
    "_constant": ("at a constant rate", "", (CONSTANT,)),
    "_constant_no_freezing": (
        "at a constant rate, without freezing", "_constant", (CONSTANT, "qat.oscillation=null"),
    ),
    "_averaged": (
        "at a constant rate, averaged weights", "_constant",
        (CONSTANT, "qat.ema_decay=0.998", "qat.bn_reestimate=always"),
    ),
    "_averaged_no_reestimation": (
        "at a constant rate, averaged weights, without re-estimation", "_averaged",
        (CONSTANT, "qat.ema_decay=0.998", "qat.bn_reestimate=never"),
    ),
}  # fmt: skip
"""Rows of MobileNetV2: end of the name -> what it is, the end of the row that it is compared with, overrides."""


def _with_own_float() -> dict[str, Row]:
    """Recipes of 4 bits and 3 epochs behind a float training of their own, and what they are without an aid."""
    mobilenet, vit = "mobilenet_v2_cifar10_w4a4", "vit_cifar10_w4a4"
    rows = {
        f"{mobilenet}{end}": Row(
            mobilenet, 4, 3, f"MobileNetV2, {what}", overrides, own_float=True, held_out=True,
            beside=f"{mobilenet}{beside}" if end else "",
        )
        for end, (what, beside, overrides) in DEPTHWISE.items()
    }  # fmt: skip
    rows[vit] = Row(vit, 4, 3, "vision transformer, our recipe", own_float=True)
    rows[f"{vit}_no_distillation"] = Row(
        vit, 4, 3, "vision transformer, without distillation", ("qat.distillation=null",), own_float=True, beside=vit
    )
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
"""Rules that docs/measurements.md compares over five epochs of the recipes, and what they change there."""


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
