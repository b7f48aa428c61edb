"""Checks on every model that its fused training step computes what the plain one does."""
