"""A model of timm on the bundled digits (pip install timm):  python examples/timm_model.py."""

import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import qat
from qat.training.data.datasets import read_digits

torch.manual_seed(0)
float_model = timm.create_model("test_resnet", num_classes=10)  # a tiny one; pretrained=True downloads its weights
config = timm.data.resolve_model_data_config(float_model)  # what the weights were trained with: mean, std, input_size
mean, std = (torch.tensor(config[key]).reshape(3, 1, 1) for key in ("mean", "std"))

pixels, labels = map(torch.from_numpy, read_digits())
images = (F.interpolate(pixels[:, None] / 255, size=32) - mean) / std  # 1,797 images (3, 32, 32), float32
train, val = torch.utils.data.random_split(TensorDataset(images, labels), [0.8, 0.2])
loader, val_batches = DataLoader(train, batch_size=32, shuffle=True), list(DataLoader(val, batch_size=128))


def fit(model: torch.nn.Module, epochs: int, lr: float) -> None:  # float and quantized alike
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=lr, weight_decay=0.01))
    model.train()
    for _epoch in range(epochs):
        for batch, targets in loader:
            loss = F.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")


fit(float_model, epochs=2, lr=2e-3)
model = qat.prepare(float_model.eval(), example_inputs=images[:2])
qat.calibrate(model, loader, limit=10)
fit(model, epochs=1, lr=2e-4)
qat.export_onnx(model.eval(), "model.onnx", images[:2])
print(qat.verify_onnx("model.onnx", model, val_batches))
