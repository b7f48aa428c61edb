"""Capture: a float model as a torch.fx graph over its own modules."""
