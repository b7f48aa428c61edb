"""Find the bits of each layer that keep the float model's answers within a budget.

Each layer alone is tried at each number of bits, on training images without labels; the sum of these losses is then
minimized by an exact solver, with weights and bit operations within the budget. With --size alone only
weights get other bits; else a layer's input gets those of its weight. Layers whose bits the run's config fixes
(first_bits, last_bits, overrides) keep them. `RUN/bits.yaml` is the run's config with the bits that
were found, from the run's float weights: `python train.py --config RUN/bits.yaml` trains it.
"""

import argparse
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

import qat
from qat.analysis.cost import LayerCost
from qat.cli.runs import Run, add_run, counts, in_torch, number, open_run
from qat.text import table
from qat.training.config.file import dump_config, load_config
from qat.training.config.schema import OverrideConfig, QuantizationConfig
from qat.training.data.loaders import Data
from qat.training.errors import UserError, value_errors_reported
from qat.training.run.folder import FLOAT_WEIGHTS, RESOLVED_CONFIG, write_text
from qat.training.run.logging import progress_bar
from qat.training.tasks.known import CLASSIFICATION

EXAMPLE = "python -m qat bits runs/resnet_int8 --choices 2,4,8 --size 4"
FILE = "bits.yaml"

Given = TypeVar("Given", QuantizationConfig, OverrideConfig)
Table = dict[str, dict[int, float]]  # a number for each layer and each choice of bits
Bits = dict[str, int]  # by layer that the config leaves open: bits of its weight, and of its input if chosen too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, overrides=True)
    parser.add_argument("--choices", type=counts, default=[2, 3, 4, 8], metavar="B,B", help="default: 2,3,4,8")
    parser.add_argument(
        "--size", type=number, metavar="BITS", help="at most so many bits, not bytes, a weight on average"
    )
    parser.add_argument("--bops", type=number, metavar="BITS", help="bit operations of at most those of BITS by BITS")
    drop = "the smallest size whose calibrated top-1 is at most so many points below float"
    parser.add_argument("--drop", type=number, metavar="POINTS", help=drop)


def run(given: argparse.Namespace) -> int:
    if (given.size, given.bops, given.drop) == (None,) * 3:
        raise UserError("bits: no budget; give --size 4, --bops 4 or --drop 0.5")
    opened = open_run(given.run_path, given.model)
    folder = opened.folder
    if opened.config.task is not CLASSIFICATION:
        raise UserError(f"bits: is for classifiers; RUN: '{opened.path}' is for {opened.config.task.name}")
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
    # The new run trains from this run's float weights, and trains no float model again.
    start = config.model.model_copy(update={"checkpoint": str((folder / FLOAT_WEIGHTS).resolve()), "weights": None})
    changed: dict[str, Any] = {"name": f"{config.name}-bits", "run_dir": None, "resume": "never"}
    changed |= {"quantization": quantization, "model": start, "float": config.float.model_copy(update={"epochs": 0})}
    write_text(folder / FILE, dump_config(config.model_copy(update=changed)))
    print(f"config: {folder / FILE}")
    return 0


@dataclass(frozen=True)
class Search:
    """Search for the bits of the layers whose bits the config leaves open."""

    opened: Run
    data: Data
    grids: QuantizationConfig
    choices: list[int]
    tensors: tuple[str, ...]  # tensors with open bits; activations have no size, and keep theirs where only that counts
    drops: dict[tuple[tuple[str, int], ...], float] = field(default_factory=dict, init=False)

    @cached_property
    def tables(self) -> tuple[Table, dict[str, Table]]:
        """The losses of each open layer at each choice, and its bytes and bit operations."""
        losses, costs = dict[int, dict[str, float]](), dict[int, dict[str, LayerCost]]()
        batches = list(self.data.calibration(self.grids.calibration_batches))
        for bits in progress_bar(self.choices, "bits"):
            # Losses are measured against the weights, which steps would round.
            grids = self._with_bits(self.grids, bits).model_copy(update={"calibration_steps": ()})
            model = self.opened.calibrated(self.data, grids)
            losses[bits] = qat.layer_losses(model, batches)
            costs[bits] = {row.name: row for row in qat.cost(model, torch.zeros(1, *self.data.image_shape))}
        names = [
            name for name in losses[self.choices[0]]
            if all(
                name in rows and {getattr(rows[name], f"{tensor}_bits") for tensor in self.tensors} == {bits}
                for bits, rows in costs.items()
            )
        ]  # fmt: skip
        if not names:
            raise UserError("bits: the config fixes the bits of every layer; leave overrides out, or change --choices")
        kinds = {
            kind: {name: {bits: float(getattr(costs[bits][name], key)) for bits in self.choices} for name in names}
            for kind, key in (("bytes", "weight_bytes"), ("bit operations", "bops"))
        }
        return {name: {bits: losses[bits][name] for bits in self.choices} for name in names}, kinds

    def budgets(self, given: argparse.Namespace) -> dict[str, float]:
        """Return the most bytes and bit operations that the open layers may have."""
        found, least = {}, self.choices[0]
        for kind, asked, power in (("bytes", given.size, 1), ("bit operations", given.bops, 2)):
            if asked is not None:
                if asked > self.choices[-1]:
                    raise UserError(f"bits: a budget of {asked:g} bits is above all --choices; it is in bits a weight")
                whole = sum(costs[least] for costs in self.tables[1][kind].values())
                found[kind] = whole * (asked / least) ** power
        return found

    def within(self, budgets: dict[str, float]) -> Bits:
        return qat.allocate(self.tables[0], self.tables[1], budgets)

    def smallest(self, drop: float, budgets: dict[str, float]) -> Bits:
        """Return bits of the least size within `drop` points of top-1, else the best."""
        low = sum(costs[self.choices[0]] for costs in self.tables[1]["bytes"].values())
        best = self.within(budgets)  # the least loss that the other budgets allow
        high = _total(self.tables[1]["bytes"], best)
        while self.below_float(best) <= drop and high - low > 0.01 * high:
            middle = (low + high) / 2
            try:
                found = self.within({**budgets, "bytes": middle})
            except ValueError:  # the other budgets need more bytes
                found = None
            if found is not None and self.below_float(found) <= drop:
                best, high = found, min(_total(self.tables[1]["bytes"], found), middle)
            else:
                low = middle
        return best

    def below_float(self, found: Bits) -> float:
        """Return the points of validation top-1 that the calibrated model loses."""
        key = tuple(found.items())
        if key not in self.drops:
            models = self.opened.float_model, self.opened.calibrated(self.data, self.quantization(found)).eval()
            right = [[in_torch(model, x).argmax(1) == labels for x, labels in self.data.val] for model in models]
            before, after = (100 * float(torch.cat(each).double().mean()) for each in right)
            self.drops[key] = before - after
        return self.drops[key]

    def quantization(self, found: Bits) -> QuantizationConfig:
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
        """Return tables of the layers, and of the whole beside equal bits everywhere."""
        losses, kinds = self.tables
        rows = [[name, str(bits), f"{losses[name][bits]:.5f}"] for name, bits in found.items()]
        named = {str(bits): dict.fromkeys(found, bits) for bits in self.choices} | {"as found": found}
        wholes = [
            [words, *(f"{_total(costs, each):,.6g}" for costs in kinds.values()), f"{_total(losses, each):.4f}"]
            for words, each in named.items()
        ]
        head = ["open layers", *kinds, "sum of losses"]
        return [
            *table([["layer", "bits", "loss alone"], *rows], numbers=True), "",
            *table([head, *wholes], numbers=True), "",
            f"calibrated, before training: {self.below_float(found):.2f} points of top-1 below float",
        ]  # fmt: skip


def _total(table: Table, found: Bits) -> float:
    return sum(table[name][bits] for name, bits in found.items())
