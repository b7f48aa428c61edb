"""A training loop of one's own, on the bundled digits:  python examples/own_loop.py."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qat
from qat.training.data.datasets import read_digits

torch.manual_seed(0)
pixels, labels = map(torch.from_numpy, read_digits())
digits = TensorDataset(pixels[:, None] / 255, labels)  # 1,797 images (1, 8, 8), float32
train, val = torch.utils.data.random_split(digits, [0.8, 0.2])
loader, val_batches = DataLoader(train, batch_size=32, shuffle=True), list(DataLoader(val, batch_size=128))
images = val_batches[0][0]


def fit(model: nn.Module, epochs: int, lr: float) -> None:  # float and quantized alike
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=lr, weight_decay=0.01))
    model.train()
    for _epoch in range(epochs):
        for batch, targets in loader:
            loss = F.cross_entropy(model(batch), targets) + qat.penalty(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")


layers = [nn.Conv2d(1, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten()]
float_model = nn.Sequential(*layers, nn.Linear(1024, 10))
fit(float_model, epochs=4, lr=2e-3)

model = qat.prepare(float_model.eval(), example_inputs=images[:2])
qat.calibrate(model, loader, limit=10)
fit(model, epochs=2, lr=2e-4)
qat.export_onnx(model.eval(), "model.onnx", images[:2])
print(qat.verify_onnx("model.onnx", model, val_batches))
