"""Lightning Fabric wraps model, optimizer and loader:  torchrun --nproc-per-node 2 docs/launchers/fabric_loop.py."""

import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qat

fabric = Fabric(devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp")
fabric.launch()  # first: it starts the ranks' group, through which calibrate shares ranges
torch.manual_seed(0)
images, labels = torch.randn(64, 3, 16, 16), torch.randint(4, (64,))
layers = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
float_model = nn.Sequential(*layers, nn.Linear(16, 4))  # your trained model

model = qat.prepare(float_model.eval(), example_inputs=images[:2]).to(fabric.device)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True))
qat.calibrate(model, [batch for batch, _ in loader])  # each rank its share
qat.sync_batch_norm(model)
optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.01, weight_decay=1e-4), momentum=0.9)
wrapped, optimizer = fabric.setup(model.train(), optimizer)
for _epoch in range(2):
    for batch, targets in loader:
        loss = F.cross_entropy(wrapped(batch), targets) + qat.penalty(model)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
if fabric.is_global_zero:
    qat.export_onnx(model.cpu().eval(), "model.onnx", images[:2])
fabric.barrier()
print(f"rank {fabric.global_rank} of {fabric.world_size}: loss {loss.item():.4f}")
