"""Models of Hugging Face with their own losses in Hugging Face's Trainer, weights at 4 bits, through to the file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qat
from qat import QuantRecipe, QuantSpec

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="the Trainer needs it")

SIZE, CLASSES = 64, 5
CLASSIFIER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIZE, "patch_size": 16}
SEGMENTER = {
    "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4], "depths": [1] * 4, "decoder_hidden_size": 32,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Dinov2ForImageClassification": (CLASSIFIER, ()),
    "SegformerForSemanticSegmentation": (SEGMENTER, (SIZE, SIZE)),
}
"""Class to its configuration and the shape of one label."""


def built(name: str) -> nn.Module:
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**MODELS[name][0], num_labels=CLASSES))
    for layer in model.modules():  # their own initial weights are for widths of a thousand: here answers would fade
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.reset_parameters()
    return model


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_in_the_trainer_and_its_file_answers_alike(name: str, tmp_path: Path) -> None:
    transformers.set_seed(0)
    model, shape = built(name), MODELS[name][1]
    images, labels = torch.randn(16, 3, SIZE, SIZE), torch.randint(CLASSES, (16, *shape))
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    recipe = QuantRecipe(weight=QuantSpec(bits=4))
    prepared = qat.prepare(model.eval(), recipe, example_inputs={"pixel_values": images[:2], "labels": labels[:2]})
    qat.calibrate(prepared, [images])
    before = {key: value.clone() for key, value in prepared.state_dict().items()}
    settings = transformers.TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, save_strategy="no", report_to="none",
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(prepared, settings, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))
    changed = {key for key, value in prepared.state_dict().items() if not torch.equal(value, before[key])}
    assert any(key.endswith("weight_quantizer.scale") for key in changed)
    qat.export_onnx(prepared.eval(), tmp_path / "model.onnx", images[:2])
    assert qat.verify_onnx(tmp_path / "model.onnx", prepared, [images]).agreement == 1.0
