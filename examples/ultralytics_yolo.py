"""YOLO of ultralytics with its own loss (pip install ultralytics):  python examples/ultralytics_yolo.py."""

import torch
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel

import qat
from qat.export.ties import explain_differences

torch.manual_seed(0)
images = torch.rand(8, 3, 128, 128)  # yours, with their boxes as center, width and height in shares of the image
batch = {
    "img": images,
    "batch_idx": torch.arange(8.0),
    "cls": torch.randint(0, 4, (8, 1)).float(),
    "bboxes": torch.rand(8, 4) * 0.3 + 0.3,
}

float_model = DetectionModel("yolov8n.yaml", nc=4, verbose=False)  # or YOLO("yolov8n.pt").model
float_model.args = get_cfg()
qat.reestimate_batch_norm(float_model, [images] * 4)  # random weights: of trained ones the statistics are there
model = qat.prepare(float_model, example_inputs=images)
qat.calibrate(model, [images])

optimizer = torch.optim.SGD(qat.parameter_groups(model, lr=1e-3, weight_decay=5e-4), momentum=0.9)
model.train()
for _ in range(8):
    loss, _ = model.loss(batch)
    loss.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.sum().item():.2f}")

qat.export_onnx(model.eval(), "yolo.onnx", images)
print(f"{explain_differences('yolo.onnx', model, images).unexplained} answers differ by more than ties")
