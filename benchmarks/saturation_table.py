"""What weights from -64 to 64 cost: the kept runs of the same models with and without them.

    python train.py --config resnet_int8.yaml name=resnet_int8_x86 quantization.target=onnxruntime_x86
    python train.py --config resnet_int8.yaml name=resnet_int8_whole_range \\
        float.epochs=0 model.checkpoint=runs/resnet_int8_x86/float.safetensors
    python train.py --config benchmarks/resnet20_cifar10_w8a8.yaml name=resnet20_cifar10_w8a8_x86 \\
        quantization.target=onnxruntime_x86 data.root=DIR model.checkpoint=FILE.safetensors
    python train.py --config benchmarks/resnet20_cifar10_w8a8.yaml name=resnet20_cifar10_w8a8_whole_range \\
        data.root=DIR model.checkpoint=FILE.safetensors
    python -m benchmarks.document runs/NAME/summary.json ...
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

RUNS = {
    "resnet_int8_whole_range": ("ResNet-18, digits", "-127 .. 127"),
    "resnet_int8_x86": ("ResNet-18, digits", "-64 .. 64"),
    "resnet20_cifar10_w8a8_whole_range": ("ResNet-20, CIFAR-10", "-127 .. 127"),
    "resnet20_cifar10_w8a8_x86": ("ResNet-20, CIFAR-10", "-64 .. 64"),
}
"""Kept run: the model and its data, and the range of its weights."""


def saturation_table() -> str:
    """One row a run in Markdown: accuracies in percent, and how many layers may saturate where that was found."""
    titles = ("model", "weights", "float", "calibrated", "QAT", "ONNX Runtime", "layers that may saturate")
    lines = [f"| {' | '.join(titles)} |", f"|---|---{'|---:' * (len(titles) - 2)}|"]
    for name, (model, weights) in RUNS.items():
        found = json.loads((RESULTS / f"{name}.json").read_text())
        top1 = [f"{found[stage]['top1']:.2f}" for stage in ("float", "calibrated", "qat", "onnx")]
        lines.append(f"| {' | '.join((model, weights, *top1, _layers(found['onnx'])))} |")
    return "\n".join(lines) + "\n"


def _layers(onnx: dict[str, Any]) -> str:
    saturation = onnx["saturation"]
    return f"{saturation['layers']} of {len(saturation['by_layer'])}"
