"""The trainer of ultralytics (pip install ultralytics):  python examples/ultralytics_trainer.py."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.io import write_png
from ultralytics.models.yolo.detect import DetectionTrainer

import qat
from qat.export.ties import explain_differences
from qat.training.config.schema import DataConfig
from qat.training.data import datasets

SIDE = 96


def write_digits(folder: Path, count: int) -> Path:
    """Write scenes of digits as YOLO's trainers read them."""
    scenes = datasets.build_dataset(DataConfig(name="canvases", image_size=SIDE), 0, kind="boxes")
    for split, part in (("train", scenes.train), ("val", scenes.val)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            write_png(part.images[i], str(folder / "images" / split / f"{i}.png"))
            rows = [row for row in part.labels[i].tolist() if row[0] >= 0]  # padded with -1; 0 is the background
            lines = [(int(k) - 1, (x + X) / 2, (y + Y) / 2, X - x, Y - y) for k, x, y, X, Y, _ in rows]
            text = "\n".join(f"{k} {' '.join(str(v / SIDE) for v in box)}" for k, *box in lines)
            (folder / "labels" / split / f"{i}.txt").write_text(text)
    file = folder / "data.yaml"
    file.write_text(f"path: {folder.resolve()}\ntrain: images/train\nval: images/val\nnames: {list('0123456789')}\n")
    return file


class Called(nn.Module):
    """A prepared model as their trainer calls one: a dict of a batch gives the loss."""

    def __init__(self, prepared: nn.Module) -> None:
        super().__init__()
        self.prepared = prepared

    def forward(self, x: Any, augment: bool = False) -> Any:
        return self.prepared.loss(x) if isinstance(x, dict) else self.prepared(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # copy and pickle ask for these
                raise
            return getattr(self.prepared, name)


class QuantizedTrainer(DetectionTrainer):
    def set_model_attributes(self) -> None:  # behind the weights; before their freezing, optimizer and EMA
        super().set_model_attributes()
        loader = self.get_dataloader(self.data["train"], self.batch_size, rank=-1)
        images = [self.preprocess_batch(batch)["img"] for batch, _ in zip(loader, range(8), strict=False)]
        qat.reestimate_batch_norm(self.model, images)  # random weights: leave it out for trained ones
        prepared = qat.prepare(self.model, example_inputs=images[0])
        qat.calibrate(prepared, images)
        self.model = Called(prepared)

    def build_optimizer(self, model: nn.Module, name: str, lr: float, momentum: float, decay: float, **_: Any) -> Any:
        groups = qat.parameter_groups(model, lr=lr, weight_decay=decay)
        return torch.optim.SGD(groups, momentum=momentum, nesterov=True)

    def save_model(self) -> bool:  # theirs saves float16
        torch.save(self.ema.ema.prepared.state_dict(), self.last)
        if self.best_fitness == self.fitness:
            torch.save(self.ema.ema.prepared.state_dict(), self.best)
        return True

    def final_eval(self) -> None:
        self.ema.ema.prepared.load_state_dict(torch.load(self.best, weights_only=True))
        self.metrics = self.validator(self)


if __name__ == "__main__":
    torch.manual_seed(0)
    settings = {
        "model": "yolov8n.yaml", "data": str(write_digits(Path("digits"), 32)), "imgsz": SIDE, "epochs": 2, "batch": 8,
        "workers": 0, "device": "cpu", "plots": False, "amp": False, "lr0": 1e-3, "warmup_epochs": 0,
        "project": str(Path("runs").resolve()),
    }  # fmt: skip
    trainer = QuantizedTrainer(overrides=settings)
    trainer.train()
    print({name: round(float(value), 4) for name, value in trainer.metrics.items()})
    model = trainer.ema.ema.prepared.eval()  # the averaged one, of the best epoch
    images = next(iter(trainer.test_loader))["img"] / 255
    qat.export_onnx(model, "yolo.onnx", images)
    print(f"{explain_differences('yolo.onnx', model, images).unexplained} answers differ by more than ties")
