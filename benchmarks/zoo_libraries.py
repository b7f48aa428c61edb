"""Models of timm, Hugging Face's transformers and ultralytics with random weights, small, some of each family."""

from typing import Any

import torch
from torch import Tensor, nn

from qat.inputs import Inputs

IMAGE_SIZE = 64
FEATURES = "_features"

AS_THEY_COME = (
    "resnet18", "regnetx_002", "regnety_002", "mobilenetv1_100", "mobilenetv2_100", "mobilenetv3_small_100",
    "mobilenetv4_conv_small", "mobilenetv4_hybrid_medium", "efficientnet_b0", "efficientnet_lite0", "mnasnet_small",
    "ghostnet_100", "repvgg_a0", "mobileone_s0", "fastvit_t8", "edgenext_xx_small", "convnext_atto",
    "hrnet_w18_small", "dla34",
)  # fmt: skip
TIMM: dict[str, dict[str, Any]] = {
    **{name: {} for name in AS_THEY_COME},
    "levit_128s": {"img_size": 224},  # its stages are built for the image size
    "vit_tiny_patch16_224": {"img_size": 64},
    "deit_tiny_patch16_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64},
    f"resnet18{FEATURES}": {"features_only": True},
    f"convnext_atto{FEATURES}": {"features_only": True},
}
"""Name to arguments of `timm.create_model`; its `img_size` is the size of the images too."""


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PATCHES = {**SIZES, "image_size": IMAGE_SIZE, "patch_size": 16, "num_labels": 5}
SWIN = {"image_size": IMAGE_SIZE, "embed_dim": 16, "depths": [2, 2, 2], "num_heads": [2, 2, 2], "window_size": 4}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1], "layer_type": "basic"}
DETECTOR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10, "num_labels": 5,
}  # fmt: skip
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", {**SIZES, "vocab_size": 100, "num_labels": 5}),
    "deit": ("DeiTForImageClassification", PATCHES),
    "depth_anything": (
        "DepthAnythingForDepthEstimation",
        {
            "backbone_config": {
                "model_type": "dinov2", **PATCHES, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4],
                "reshape_hidden_states": False,
            },
            "patch_size": 16, "reassemble_hidden_size": 32, "neck_hidden_sizes": [8, 16, 24, 32],
            "fusion_hidden_size": 16, "head_hidden_size": 8, "depth_estimation_type": "metric",  # else a ReLU ends it
        },
    ),
    "detr": (
        "DetrForObjectDetection",
        {
            **DETECTOR, "use_timm_backbone": False,
            "backbone_config": {"model_type": "resnet", **RESNET, "out_features": ["stage4"]},
        },
    ),
    "dinov2": ("Dinov2ForImageClassification", PATCHES),
    "mask2former": (
        "Mask2FormerForUniversalSegmentation",
        {
            "backbone_config": {
                "model_type": "swin", **SWIN, "depths": [1] * 4, "num_heads": [2] * 4,
                "out_features": [f"stage{number}" for number in (1, 2, 3, 4)],
            },
            "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 64,
            "dim_feedforward": 64, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2,
            "num_queries": 10, "num_labels": 5,
        },
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        {"hidden_sizes": [32, 40, 48], "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 96], "num_labels": 5},
    ),
    "mobilevitv2": (
        "MobileViTV2ForImageClassification", {"width_multiplier": 0.25, "n_attn_blocks": [1, 1, 1], "num_labels": 5},
    ),
    "rt_detr": (
        "RTDetrForObjectDetection",
        {
            **DETECTOR, "encoder_hidden_dim": 32, "encoder_in_channels": [24, 32, 48], "decoder_in_channels": [32] * 3,
            "backbone_config": {"model_type": "rt_detr_resnet", **RESNET, "out_indices": [2, 3, 4]},
        },
    ),
    "sam": (
        "SamVisionModel",
        {
            **SIZES, "image_size": IMAGE_SIZE, "patch_size": 16, "output_channels": 16, "window_size": 3,
            "global_attn_indexes": [1], "num_pos_feats": 16,
        },
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 32,
            "depths": [1, 1, 1, 1], "num_labels": 5,
        },
    ),
    "siglip": ("SiglipForImageClassification", {"vision_config": PATCHES, "num_labels": 5}),
    "swin": ("SwinForImageClassification", {**SWIN, "num_labels": 5}),
    "vit": ("ViTForImageClassification", PATCHES),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification",
        {
            **SIZES, "conv_dim": [16] * 3, "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3],
            "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
            "num_labels": 5, "layerdrop": 0.0,  # a layer that is dropped in training has no gradient
        },
    ),
    "yolos": (
        "YolosForObjectDetection", {**PATCHES, "image_size": [IMAGE_SIZE, IMAGE_SIZE], "num_detection_tokens": 10},
    ),
}  # fmt: skip
"""Name to a model's class and its configuration, which names its backbone in place of one to download."""

ULTRALYTICS = ("yolo11n", "yolo26n", "yolov8n")
"""Configurations of the package; under AGPL, so nothing but this benchmark needs it, and no code of it is here."""

NAMES = {"timm": sorted(TIMM), "transformers": sorted(TRANSFORMERS), "ultralytics": sorted(ULTRALYTICS)}


def build_from(library: str, name: str) -> tuple[nn.Module, Inputs]:
    """A model of a library as it comes, and its inputs; libraries are imported here, since names are read without."""
    if library == "timm":
        import timm

        size = TIMM[name].get("img_size", IMAGE_SIZE)
        model = timm.create_model(name.removesuffix(FEATURES), num_classes=10, **TIMM[name])
        return model, (torch.randn(2, 3, size, size),)
    if library == "ultralytics":
        from ultralytics.nn.tasks import DetectionModel

        return DetectionModel(f"{name}.yaml", nc=4, verbose=False), (torch.randn(2, 3, 128, 128),)
    import transformers

    kind, options = TRANSFORMERS[name]
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**options))
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            layer.reset_parameters()  # their own initial weights are for widths of a thousand: here answers would fade
    return model, _keywords(name)


def _keywords(name: str) -> dict[str, Tensor]:
    """The inputs of a model of transformers, by name."""
    if name == "bert":
        mask = torch.ones(2, 12, dtype=torch.long).tril(8)
        return {"input_ids": torch.randint(0, 100, (2, 12)), "attention_mask": mask}
    if name == "wav2vec2":
        return {"input_values": torch.randn(2, 4000)}
    return {"pixel_values": torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE)}
