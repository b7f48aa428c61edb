"""Fine-tune a model with quantization, export and prove it, as train.py does."""

from qat.training.run.exit_status import HOW_TO_RESUME
from qat.training.script import add_arguments, run_parsed

__all__ = ["EXAMPLE", "WAY_ON", "add_arguments", "run"]

EXAMPLE = "python -m qat train resnet_int8.yaml qat.epochs=2"
WAY_ON = HOW_TO_RESUME
run = run_parsed
