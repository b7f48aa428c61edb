"""Training loop of a stage: steps, evaluation, optimizer, aids and curves."""
