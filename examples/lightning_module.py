"""Lightning's Trainer on the bundled digits (pip install lightning):  python examples/lightning_module.py."""

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qat
from qat.training.data.datasets import read_digits

torch.manual_seed(0)
pixels, labels = map(torch.from_numpy, read_digits())
digits = TensorDataset(pixels[:, None] / 255, labels)  # 1,797 images (1, 8, 8), float32
train, val = torch.utils.data.random_split(digits, [0.8, 0.2])
loader, val_batches = DataLoader(train, batch_size=32, shuffle=True), list(DataLoader(val, batch_size=128))
images = val_batches[0][0]


class Classifier(lightning.LightningModule):
    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(qat.parameter_groups(self.model, lr=self.lr, weight_decay=0.01))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels) + qat.penalty(self.model)


class Quantized(Classifier):
    def on_train_epoch_start(self) -> None:
        qat.freeze_batch_norm(self.model, self.current_epoch >= 1)  # the same after a resume


def fit(module: Classifier, epochs: int) -> None:
    trainer = lightning.Trainer(max_epochs=epochs, devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(module.train(), loader)  # Lightning leaves a module in the mode in which it comes


layers = [nn.Conv2d(1, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten()]
float_model = nn.Sequential(*layers, nn.Linear(1024, 10))
fit(Classifier(float_model, lr=2e-3), epochs=4)

model = qat.prepare(float_model.cpu().eval(), example_inputs=images[:2])
qat.calibrate(model, loader, limit=10)
fit(Quantized(model, lr=2e-4), epochs=2)
qat.export_onnx(model.cpu().eval(), "model.onnx", images[:2])
print(qat.verify_onnx("model.onnx", model, val_batches))
