"""The rows of docs/accuracy.md: recipes of configs/, and baselines that get the same epochs, data and float weights."""

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
        own_float: whether its float weights are trained first, once for all rows of the config; false: `--weights`.
    """

    config: str
    bits: int
    epochs: int
    what: str
    overrides: tuple[str, ...] = ()
    teacher: bool = False
    own_float: bool = False


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
    return (
        rows
        | _with_aids("mobilenet_v2_cifar10_w4a4", "MobileNetV2")
        | _with_aids("vit_cifar10_w4a4", "vision transformer")
    )


AIDS = {
    "distillation": "qat.distillation=null",
    "re-estimation": "qat.bn_reestimate=never",
    "freezing": "qat.oscillation.freeze=null",
}
"""What a recipe of a network with its own float training is compared without."""


def _with_aids(name: str, network: str) -> dict[str, Row]:
    """A recipe of 4 bits and 3 epochs behind a float training of its own, and without each aid that it has."""
    has = AIDS if name.startswith("mobilenet") else {"distillation": AIDS["distillation"]}
    rows = {name: Row(name, 4, 3, f"{network}, our recipe", own_float=True)}
    for aid, override in has.items():
        rows[f"{name}_no_{aid.replace('-', '')}"] = Row(
            name, 4, 3, f"{network}, without {aid}", (override,), own_float=True
        )
    if len(has) > 1:
        rows[f"{name}_none"] = Row(name, 4, 3, f"{network}, without all of these", tuple(has.values()), own_float=True)
    return rows


ROWS = _rows()
"""Name of the run folder and of the result -> the row."""
