"""Fine-tune a torchvision model with quantization, export it to integers, and prove that both predict the same.

    python train.py resnet_int8.yaml [key.path=value ...]

The recipe is `run` and `run_stages` of qat/training/script.py, from top to bottom: float baseline, prepare, calibrate,
QAT, export, proof.
"""

import sys

from qat.training.script import main

if __name__ == "__main__":
    sys.exit(main())
