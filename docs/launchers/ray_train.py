"""Ray Train starts the ranks, and restarts a failed run:  python docs/launchers/ray_train.py."""

import os
import sys

import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qat


def loop(config: dict[str, str]) -> None:
    """What every rank runs; Ray has started their group, through which calibrate shares ranges."""
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 16, 16), torch.randint(4, (64,))
    layers = [nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    float_model = nn.Sequential(*layers, nn.Linear(16, 4))  # your trained model

    model = qat.prepare(float_model.eval(), example_inputs=images[:2]).to(get_device())
    loader = prepare_data_loader(DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True))
    qat.calibrate(model, [batch for batch, _ in loader])  # each rank its share
    qat.sync_batch_norm(model)
    wrapped = prepare_model(model.train())
    optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=0.01, weight_decay=1e-4), momentum=0.9)
    for _epoch in range(2):
        for batch, targets in loader:
            loss = F.cross_entropy(wrapped(batch), targets) + qat.penalty(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ray.train.report({"loss": loss.item()})
    if ray.train.get_context().get_world_rank() == 0:
        qat.export_onnx(model.cpu().eval(), config["file"], images[:2])


if __name__ == "__main__":
    ranks = ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}})
    print(TorchTrainer(loop, train_loop_config={"file": os.path.abspath("model.onnx")}, scaling_config=ranks).fit())
