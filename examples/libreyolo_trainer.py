"""The trainer of LibreYOLO (pip install libreyolo):  python examples/libreyolo_trainer.py."""

from pathlib import Path
from typing import Any

import torch
from libreyolo import LibreYOLO9
from libreyolo.models.yolo9.loss import YOLO9Loss
from libreyolo.models.yolo9.trainer import YOLO9Trainer
from torch import Tensor
from torchvision.io import write_png

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


class QuantizedTrainer(YOLO9Trainer):
    def on_setup(self) -> None:
        head = self.model.head
        sizes = {"num_classes": head.nc, "reg_max": head.reg_max, "strides": head.stride.tolist(), "image_size": None}
        self.loss = YOLO9Loss(**sizes, device=self.device)

    def on_forward(self, imgs: Tensor, targets: Tensor, polygons: Any = None) -> dict[str, Tensor]:
        self.loss.update_anchors([imgs.shape[3], imgs.shape[2]])
        return self.loss(self.model(imgs), targets)  # in training the model without targets returns its maps

    def _setup_optimizer(self) -> torch.optim.Optimizer:
        groups = qat.parameter_groups(self.model, lr=1.0, weight_decay=self.config.weight_decay)
        for group in groups:
            group["share"] = group["lr"]  # their schedule writes lr
        return torch.optim.SGD(groups, momentum=self.config.momentum, nesterov=True)

    def _scale_lr(self, base_lr: float, param_group: dict[str, Any]) -> float:
        return base_lr * param_group["share"]


torch.manual_seed(0)
data = write_digits(Path("digits"), 32)
images = datasets.build_dataset(DataConfig(name="canvases", image_size=SIDE), 0, kind="boxes").train.images[:16] / 255

yolo = LibreYOLO9(None, size="t", nb_classes=10, device="cpu")  # or LibreYOLO9("LibreYOLO9t.pt")
qat.reestimate_batch_norm(yolo.model, [images])  # random weights: of trained ones the statistics are there
yolo.model = qat.prepare(yolo.model, example_inputs=images[:4])
qat.calibrate(yolo.model, images.split(4))

trainer = QuantizedTrainer(
    model=yolo.model, wrapper_model=yolo, size="t", num_classes=10, data=str(data), imgsz=SIDE, epochs=2, batch=8,
    workers=0, device="cpu", amp=False, lr0=1e-3, warmup_epochs=0, eval_interval=1, project="runs", name="libreyolo",
)  # fmt: skip
results = trainer.train()
print([round(each["metrics/mAP50-95"], 4) for each in results["val_metrics"]])

saved = torch.load("runs/libreyolo/weights/best.pt", weights_only=True)
yolo.model.load_state_dict(saved["model"])  # the averaged one, in float32
model = yolo.model.eval()
qat.export_onnx(model, "yolo.onnx", images[:4])
print(f"{explain_differences('yolo.onnx', model, images[:4]).unexplained} answers differ by more than ties")
