"""Checks that a model's fused training step computes what the plain one does."""
