"""Accelerate wraps model, optimizer and loader:  accelerate launch --num-processes 2 docs/launchers/accelerate_loop.py

On CPUs it is `ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 docs/launchers/accelerate_loop.py`.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qat

accelerator = Accelerator()  # first: it starts the ranks' group, through which calibrate shares ranges
torch.manual_seed(0)
images, labels = torch.randn(64, 3, 16, 16), torch.randint(4, (64,))
layers = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
float_model = nn.Sequential(*layers, nn.Linear(16, 4))  # your trained model

model = qat.prepare(float_model.eval(), example_inputs=images[:2]).to(accelerator.device)
loader = accelerator.prepare(DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True))
qat.calibrate(model, [batch for batch, _ in loader])  # each rank its share
qat.sync_batch_norm(model)
optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.01, weight_decay=1e-4), momentum=0.9)
wrapped, optimizer = accelerator.prepare(model.train(), optimizer)
for _epoch in range(2):
    for batch, targets in loader:
        loss = F.cross_entropy(wrapped(batch), targets) + qat.penalty(model)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    trained = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)  # without the autocast of mixed precision
    qat.export_onnx(trained.cpu().eval(), "model.onnx", images[:2])
accelerator.wait_for_everyone()
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: loss {loss.item():.4f}")
accelerator.end_training()
