"""The Trainer of Hugging Face (pip install transformers accelerate):  python examples/huggingface_trainer.py."""

import torch
import transformers
from torch import nn

import qat
from qat.training.data.datasets import read_digits

transformers.set_seed(0)
pixels, labels = map(torch.from_numpy, read_digits())
images = pixels[:, None] / 255  # 1,797 images (1, 8, 8), float32
digits = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
train, val = torch.utils.data.random_split(digits, [0.8, 0.2])


def fit(model: nn.Module, epochs: int, lr: float) -> None:  # float and quantized alike
    settings = transformers.TrainingArguments(
        "runs/huggingface", num_train_epochs=epochs, per_device_train_batch_size=32, per_device_eval_batch_size=128,
        save_strategy="no", report_to="none",
    )  # fmt: skip
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=lr, weight_decay=0.01))
    trainer = transformers.Trainer(model, settings, train_dataset=train, eval_dataset=val, optimizers=(optimizer, None))
    trainer.train()
    print(trainer.evaluate())


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = transformers.ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)
float_model = transformers.ViTForImageClassification(config)  # or from_pretrained(name)
fit(float_model, epochs=12, lr=2e-3)

model = qat.prepare(float_model.cpu().eval(), example_inputs={"pixel_values": images[:2], "labels": labels[:2]})
qat.calibrate(model, images[train.indices[:320]].split(32))
fit(model, epochs=1, lr=2e-4)
qat.export_onnx(model.cpu().eval(), "model.onnx", images[:2])
print(qat.verify_onnx("model.onnx", model, [(images[val.indices], labels[val.indices])]))
