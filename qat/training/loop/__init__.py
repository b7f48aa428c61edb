"""The training loop of a stage: steps, evaluation, optimizer, device, and support for the quantization rules."""
