"""Models of timm and Hugging Face's transformers with random weights, small, one or two of each family of networks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

IMAGE_SIZE = 64

TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "regnetx_002": {},
    "regnety_002": {},
    "mobilenetv1_100": {},
    "mobilenetv2_100": {},
    "mobilenetv3_small_100": {},
    "mobilenetv4_conv_small": {},
    "mobilenetv4_hybrid_medium": {},
    "efficientnet_b0": {},
    "efficientnet_lite0": {},
    "mnasnet_small": {},
    "ghostnet_100": {},
    "repvgg_a0": {},
    "mobileone_s0": {},
    "fastvit_t8": {},
    "edgenext_xx_small": {},
    "levit_128s": {"img_size": 224},  # its stages are built for the image size
    "convnext_atto": {},
    "vit_tiny_patch16_224": {"img_size": 64},
    "deit_tiny_patch16_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64},
    "hrnet_w18_small": {},
    "dla34": {},
}
"""Name to arguments of `timm.create_model`; its `img_size` is the size of the images too."""


def _transformers(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of a family, from a configuration, and its inputs by name."""
    import transformers as hf

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    images = {"pixel_values": torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)}
    patches = {**sizes, "image_size": IMAGE_SIZE, "patch_size": 16, "num_labels": 5}
    text = {
        "input_ids": torch.randint(0, 100, (2, 12)),
        "attention_mask": torch.ones(2, 12, dtype=torch.long).tril(8),
    }
    models: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
        "vit": lambda: (hf.ViTForImageClassification(hf.ViTConfig(**patches)), images),
        "deit": lambda: (hf.DeiTForImageClassification(hf.DeiTConfig(**patches)), images),
        "swin": lambda: (
            hf.SwinForImageClassification(
                hf.SwinConfig(
                    image_size=IMAGE_SIZE, embed_dim=16, depths=[2, 2, 2], num_heads=[2, 2, 2], window_size=4,
                    num_labels=5,
                )
            ),
            images,
        ),
        "mobilevit": lambda: (
            hf.MobileViTForImageClassification(
                hf.MobileViTConfig(
                    hidden_sizes=[32, 40, 48], neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 96], num_labels=5
                )
            ),
            images,
        ),
        "segformer": lambda: (
            hf.SegformerForSemanticSegmentation(
                hf.SegformerConfig(
                    hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=32,
                    depths=[1, 1, 1, 1], num_labels=5,
                )
            ),
            images,
        ),
        "bert": lambda: (
            hf.BertForSequenceClassification(hf.BertConfig(vocab_size=100, num_labels=5, **sizes)), text
        ),
    }  # fmt: skip
    return models[name]()


NAMES = {"timm": sorted(TIMM), "transformers": ["bert", "deit", "mobilevit", "segformer", "swin", "vit"]}


class Logits(nn.Module):
    """A model of transformers as a function of tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class ImageLogits(Logits):
    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=pixel_values).logits
        return logits


class TextLogits(Logits):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def build_from(library: str, name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of a library, as a function of tensors, and its inputs."""
    if library == "timm":
        import timm  # here and in `_transformers`: the names are read without them

        size = TIMM[name].get("img_size", IMAGE_SIZE)
        return timm.create_model(name, num_classes=10, **TIMM[name]), (torch.randn(2, 3, size, size),)
    model, inputs = _transformers(name)
    wrapped = TextLogits(model) if "input_ids" in inputs else ImageLogits(model)
    return wrapped, tuple(inputs.values())
