"""The training loop of a stage: steps, evaluation, optimizer, device, and what the rules of a model ask of it."""
