"""Post-training steps of `qat.calibrate`, from a few batches without labels.

    qat.calibrate(model, batches, steps=[CrossLayerEqualization(), AdaRound()])

Each changes float weights, biases or gains of BatchNorm in place, so that the grids lose less. The model stays what it
was otherwise: it trains, evaluates and exports as without them.
"""

from qat.post_training.equalization import CrossLayerEqualization
from qat.post_training.reconstruction import BRECQ, AdaRound, QDrop

__all__ = ["BRECQ", "AdaRound", "CrossLayerEqualization", "QDrop"]

STEPS = {"cross_layer_equalization": CrossLayerEqualization, "adaround": AdaRound, "brecq": BRECQ, "qdrop": QDrop}
"""Names of the steps in a config."""
