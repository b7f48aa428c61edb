"""Bits of each layer within a budget: those that keep the float model's answers best, by an exact solver.

Each layer alone is tried at each number of bits, on training images without labels; the sum of these losses is then
made least such that weights, bit operations or a runtime's milliseconds stay within the budget. With --size alone only
weights get other bits; else a layer's input gets those of its weight. Layers whose bits the run's config fixes
(first_bits, last_bits, overrides) keep them. `RUN/bits.yaml` is the run's config with the bits that
were found, from the run's float weights: `python train.py --config RUN/bits.yaml` trains it.
"""

import argparse
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

import qat
from qat.analysis.cost import LayerCost
from qat.cli.runs import Run, add_overrides, add_run, counts, in_torch, number, open_run
from qat.text import table
from qat.training.config.file import dump_config, load_config
from qat.training.config.schema import OverrideConfig, QuantizationConfig
from qat.training.data.loaders import Data
from qat.training.errors import UserError, value_errors_reported
from qat.training.run.folder import FLOAT_WEIGHTS, RESOLVED_CONFIG, write_text
from qat.training.run.logging import progress_bar

EXAMPLE = "python -m qat bits runs/resnet_int8 --choices 2,4,8 --size 4"

FILE = "bits.yaml"

Given = TypeVar("Given", QuantizationConfig, OverrideConfig)

Bits = dict[str, int]
"""Bits of weight, and of input if these are chosen too, of each layer that the config leaves open."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `bits`."""
    add_run(parser)
    add_overrides(parser)
    parser.add_argument("--choices", type=counts, default=[2, 3, 4, 8], metavar="B,B", help="default: 2,3,4,8")
    parser.add_argument(
        "--size", type=number, metavar="BITS", help="at most so many bits, not bytes, a weight on average"
    )
    parser.add_argument("--bops", type=number, metavar="BITS", help="bit operations of at most those of BITS by BITS")
    drop = "the smallest size whose calibrated top-1 is at most so many points below float"
    parser.add_argument("--drop", type=number, metavar="POINTS", help=drop)


def run(given: argparse.Namespace) -> int:
    """Find the bits, measure what they give before training, and write the config."""
    if (given.size, given.bops, given.drop) == (None,) * 3:
        raise UserError("bits: no budget; give --size 4, --bops 4 or --drop 0.5")
    opened = open_run(given.run_path, given.model)
    folder = opened.folder
    config = load_config(str(folder / RESOLVED_CONFIG), given.overrides)
    tensors = ("weight",) if given.bops is None and given.drop is None else ("weight", "activation")
    search = Search(opened, opened.data(given.overrides), config.quantization, sorted(given.choices), tensors)
    with value_errors_reported():
        budgets = search.budgets(given)
        found = search.within(budgets) if given.drop is None else search.smallest(given.drop, budgets)
    quantization = search.quantization(found)
    print("\n".join(search.described(found)), flush=True)
    if given.drop is not None and search.below_float(found) > given.drop:
        print(f"no choice of these bits is at most {given.drop:g} points below float; give more bits, or train")
        return 1
    start = config.model.model_copy(update={"checkpoint": str((folder / FLOAT_WEIGHTS).resolve()), "weights": None})
    changed: dict[str, Any] = {"name": f"{config.name}-bits", "run_dir": None, "resume": "never"}
    changed |= {"quantization": quantization, "model": start, "float": config.float.model_copy(update={"epochs": 0})}
    write_text(folder / FILE, dump_config(config.model_copy(update=changed)))
    print(f"config: {folder / FILE}")
    return 0


@dataclass(frozen=True)
class Search:
    """The layers of a run whose bits are open, what each loses and costs at each of the choices."""

    opened: Run
    data: Data
    grids: QuantizationConfig
    choices: list[int]
    tensors: tuple[str, ...]
    """Whose bits are chosen: activations have no size, and keep theirs where only that counts."""

    @cached_property
    def tables(self) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, LayerCost]]]:
        """The losses and the costs of each open layer, for each choice."""
        losses, costs = dict[int, dict[str, float]](), dict[int, dict[str, LayerCost]]()
        batches = list(self.data.calibration(self.grids.calibration_batches))
        for bits in progress_bar(self.choices, "bits"):
            # Steps would round the weights that the losses are measured against.
            grids = self._with_bits(self.grids, bits).model_copy(update={"calibration_steps": ()})
            model = self.opened.calibrated(self.data, grids)
            losses[bits] = qat.layer_losses(model, batches)
            costs[bits] = {row.name: row for row in qat.cost(model, torch.zeros(1, *self.data.image_shape))}

        def is_open(name: str) -> bool:
            return all(
                name in rows and {getattr(rows[name], f"{tensor}_bits") for tensor in self.tensors} == {bits}
                for bits, rows in costs.items()
            )

        names = [name for name in losses[self.choices[0]] if is_open(name)]
        if not names:
            raise UserError("bits: the config fixes the bits of every layer; leave overrides out, or change --choices")
        return (
            {name: {bits: losses[bits][name] for bits in self.choices} for name in names},
            {name: {bits: costs[bits][name] for bits in self.choices} for name in names},
        )

    @cached_property
    def kinds(self) -> dict[str, dict[str, dict[int, float]]]:
        """Bytes and bit operations of each open layer, for each choice."""
        _, costs = self.tables
        return {
            kind: {
                name: {bits: float(getattr(row, field)) for bits, row in rows.items()} for name, rows in costs.items()
            }
            for kind, field in (("bytes", "weight_bytes"), ("bit operations", "bops"))
        }

    def budgets(self, given: argparse.Namespace) -> dict[str, float]:
        """The most of each kind that the open layers may have."""
        found, least = {}, self.choices[0]
        for kind, asked, power in (("bytes", given.size, 1), ("bit operations", given.bops, 2)):
            if asked is not None:
                if asked > self.choices[-1]:
                    raise UserError(f"bits: a budget of {asked:g} bits is above all --choices; it is in bits a weight")
                whole = sum(costs[least] for costs in self.kinds[kind].values())
                found[kind] = whole * (asked / least) ** power
        return found

    def within(self, budgets: dict[str, float]) -> Bits:
        """The bits with the least loss within budgets."""
        return qat.allocate(self.tables[0], self.kinds, budgets)

    def smallest(self, drop: float, budgets: dict[str, float]) -> Bits:
        """The bits of the least size, found by halving, that lose at most `drop` points of top-1; the best of all where
        none does."""
        sizes = [
            sum(costs[bits] for costs in self.kinds["bytes"].values()) for bits in (self.choices[0], self.choices[-1])
        ]
        low, best = sizes[0], self.within(budgets)
        high = self.cost_of("bytes", best)
        while self.below_float(best) <= drop and high - low > 0.01 * high:
            middle = (low + high) / 2
            try:
                found = self.within({**budgets, "bytes": middle})
            except ValueError:  # the other budgets need more bytes
                found = None
            if found is not None and self.below_float(found) <= drop:
                best, high = found, min(self.cost_of("bytes", found), middle)
            else:
                low = middle
        return best

    def cost_of(self, kind: str, found: Bits) -> float:
        """What the open layers cost with these bits."""
        return sum(self.kinds[kind][name][bits] for name, bits in found.items())

    def below_float(self, found: Bits) -> float:
        """Points of top-1 that the calibrated model is below float on the validation images."""
        key = tuple(found.items())
        if key not in self._drops:
            model = self.opened.calibrated(self.data, self.quantization(found))
            self._drops[key] = self._top1(self.opened.float_model) - self._top1(model)
        return self._drops[key]

    @cached_property
    def _drops(self) -> dict[tuple[tuple[str, int], ...], float]:
        return {}

    def _top1(self, model: nn.Module) -> float:
        right = [(in_torch(model.eval(), images).argmax(1) == labels).double() for images, labels in self.data.val]
        return 100 * float(torch.cat(right).mean())

    def quantization(self, found: Bits) -> QuantizationConfig:
        """The run's grids with these bits."""
        own = self.grids.overrides
        chosen = {name: self._with_bits(own.get(name, OverrideConfig()), bits) for name, bits in found.items()}
        # They come last, since later keys win.
        kept = {key: each for key, each in own.items() if key not in chosen}
        return self.grids.model_copy(update={"overrides": {**kept, **chosen}})

    def _with_bits(self, given: Given, bits: int) -> Given:
        changed = {tensor: getattr(given, tensor).model_copy(update={"bits": bits}) for tensor in self.tensors}
        if bits >= 8 and self.grids.weight.narrow_range is False:
            # The lowest level of 8 bits does not fit int8 once a negative gamma is folded into it.
            changed["weight"] = changed["weight"].model_copy(update={"narrow_range": True})
        return given.model_copy(update=changed)

    def described(self, found: Bits) -> list[str]:
        """The layers with their bits and losses, and the whole beside all layers at one number of bits."""
        losses, _ = self.tables
        rows = [[name, str(bits), f"{losses[name][bits]:.5f}"] for name, bits in found.items()]
        wholes = [[str(bits), *self._totals(dict.fromkeys(found, bits))] for bits in self.choices]
        head = ["open layers", *self.kinds, "sum of losses"]
        return [
            *table([["layer", "bits", "loss alone"], *rows], numbers=True), "",
            *table([head, *wholes, ["as found", *self._totals(found)]], numbers=True), "",
            f"calibrated, before training: {self.below_float(found):.2f} points of top-1 below float",
        ]  # fmt: skip

    def _totals(self, found: Bits) -> list[str]:
        loss = sum(self.tables[0][name][bits] for name, bits in found.items())
        return [*(f"{self.cost_of(kind, found):,.6g}" for kind in self.kinds), f"{loss:.4f}"]
