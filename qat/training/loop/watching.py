"""What a stage draws of its quantizers while it trains: what they learn and clip, and weights that turn round."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qat.analysis.statistics import learned_statistics, statistics_collected, weight_samples
from qat.collectives import rank
from qat.quantizer import Quantizer
from qat.training.config.schema import RunConfig
from qat.training.loop.stage import StageRun
from qat.training.run.logging import OF_QUANTIZERS, RunLog

AT_FLOOR = f"{OF_QUANTIZERS}at_floor/"


class Watch:
    """The curves of a stage's quantizers, as far as `watch` asks for them; rank 0 draws for all.

    `curves` go with the points of the other curves, and read parameters alone; `looking` is for evaluations.
    """

    def __init__(self, run: StageRun) -> None:
        self.run, self.detail = run, run.config.watch if rank() == 0 else "off"
        found = {name: each for name, each in run.model.named_modules() if isinstance(each, Quantizer)}
        self.quantizers = {} if self.detail == "off" else found
        self.gradients: dict[str, Tensor] = {}
        self.rested = set[str]()
        self.codes: dict[str, Tensor] = {}
        self.directions: dict[str, Tensor] = {}

    def is_due(self, number: int, last: int) -> bool:
        """Whether a point follows this step of an epoch."""
        return bool(self.quantizers) and (number % self.run.config.log_every == 0 or number == last)

    def keep_gradients(self) -> None:
        """Take note of the gradients of a step, before they are gone."""
        learned = {
            f"gradient/{name}": [p.grad for p in each.parameters() if p.grad is not None]
            for name, each in self.quantizers.items()
        }
        self.gradients = {tag: nn.utils.get_total_norm(each) for tag, each in learned.items() if each}

    @torch.no_grad()
    def curves(self) -> dict[str, Tensor]:
        """What the quantizers have learned by now, and their gradients, each of shape () on the device."""
        turned = self._turned() if self.quantizers and self.detail == "all" else {}
        curves = {**learned_statistics(self.quantizers), **self.gradients, **turned}
        return {f"{OF_QUANTIZERS}{tag}": value for tag, value in curves.items()}

    def worth_drawing(self, curves: dict[str, float]) -> dict[str, float]:
        """The curves without those of scales that have never rested on their floor: what is drawn of them is a sign."""
        self.rested |= {tag for tag, value in curves.items() if tag.startswith(AT_FLOOR) and value}
        return {tag: value for tag, value in curves.items() if not tag.startswith(AT_FLOOR) or tag in self.rested}

    def state_dict(self) -> dict[str, Any]:
        """What curves that go on need to know of the points before."""
        return {"rested": sorted(self.rested), "codes": self.codes, "directions": self.directions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.rested = set(state["rested"])
        for kept, saved in ((self.codes, state["codes"]), (self.directions, state["directions"])):
            kept.update({name: values.to(self.run.device) for name, values in saved.items()})

    def _turned(self) -> dict[str, Tensor]:
        """By weight, the share of a sample whose integer moved since the last point, against its move before."""
        names = {each: name for name, each in self.quantizers.items()}
        curves = {}
        for quantizer, read in weight_samples(self.run.model).items():
            if not (quantizer.uniform and quantizer.exportable):
                continue
            name, codes = names[quantizer], quantizer.compute_codes(read()).to(torch.int16)
            if name in self.codes and self.codes[name].shape == codes.shape:
                moved = torch.sign(codes - self.codes[name]).to(torch.int8)
                before = self.directions.get(name, torch.zeros_like(moved))
                curves[f"oscillating/{name}"] = (moved * before < 0).float().mean()
                self.directions[name] = torch.where(moved == 0, before, moved)
            self.codes[name] = codes
        return curves


@contextmanager
def looking(config: RunConfig, model: nn.Module, log: RunLog, stage: str, step: int) -> Iterator[dict[str, Any]]:
    """A context for an evaluation, whose first batch shows what the quantizers do to their tensors; it ends as curves.

    It yields what `statistics_collected` does; empty where nothing is watched.
    """
    if config.watch != "all" or rank() != 0:
        yield {}
        return
    with statistics_collected(model) as found:
        yield found
    curves = {f"{OF_QUANTIZERS}{key}/{name}": row[key] for name, row in found.items() for key in row}
    log.scalars(stage, "train", curves, step)
