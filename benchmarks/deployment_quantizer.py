"""ai-edge-quantizer, run by an interpreter of its own: FLOAT.tflite IMAGES.npy TARGET.tflite, images (N, 1, H, W, C).

Its static recipe: int8 weights per channel, int8 activations, ranges from the smallest to the largest value; but float
inputs and outputs, as our file has.
"""

import importlib.metadata
import sys

import numpy as np


def main() -> None:
    from ai_edge_quantizer import quantizer, recipe_manager

    source, images, target = sys.argv[1:]
    names = recipe_manager.qtyping.TFLOperationName
    rules = recipe_manager.RecipeManager()
    rules.add_static_config(".*", names.ALL_SUPPORTED, activation_num_bits=8, weight_num_bits=8)
    for end in (names.INPUT, names.OUTPUT):
        rules.add_quantization_config(".*", end, algorithm_key=recipe_manager.AlgorithmName.NO_QUANTIZE)
    made = quantizer.Quantizer(source, rules.get_quantization_recipe())
    data = {"serving_default": [{"x": image} for image in np.load(images)]}
    made.quantize(made.calibrate(data)).export_model(target, overwrite=True)
    print(importlib.metadata.version("ai-edge-quantizer"))


if __name__ == "__main__":
    main()
