"""The proof, for every model, that its fused training step is the plain one."""
