"""The Trainer of Hugging Face (pip install transformers accelerate):  python examples/huggingface_trainer.py."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import qat
from qat.training.data.datasets import read_digits


class Logits(nn.Module):  # a model of transformers as a function of tensors
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values=pixel_values).logits


class QATTrainer(transformers.Trainer):  # a prepared model returns scores alone
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        logits = model(inputs["pixel_values"])
        loss = F.cross_entropy(logits, inputs["labels"])
        return (loss, {"logits": logits}) if return_outputs else loss


transformers.set_seed(0)
pixels, labels = map(torch.from_numpy, read_digits())
images = pixels[:, None] / 255  # 1,797 images (1, 8, 8), float32
digits = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
train, val = torch.utils.data.random_split(digits, [0.8, 0.2])


def fit(model: nn.Module, epochs: int, lr: float) -> None:  # float and quantized alike
    settings = transformers.TrainingArguments(
        "runs/huggingface", num_train_epochs=epochs, per_device_train_batch_size=32, per_device_eval_batch_size=128,
        save_strategy="no", report_to="none", remove_unused_columns=False, label_names=["labels"],
    )  # fmt: skip
    optimizer = torch.optim.AdamW(qat.parameter_groups(model, lr=lr, weight_decay=0.01))
    trainer = QATTrainer(model, settings, train_dataset=train, eval_dataset=val, optimizers=(optimizer, None))
    trainer.train()
    print(trainer.evaluate())


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = transformers.ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)
float_model = Logits(transformers.ViTForImageClassification(config))  # or from_pretrained(name)
fit(float_model, epochs=12, lr=2e-3)

model = qat.prepare(float_model.cpu().eval(), example_inputs=images[:2])
qat.calibrate(model, images[train.indices[:320]].split(32))
fit(model, epochs=1, lr=2e-4)
qat.export_onnx(model.cpu().eval(), "model.onnx", images[:2])
print(qat.verify_onnx("model.onnx", model, [(images[val.indices], labels[val.indices])]))
