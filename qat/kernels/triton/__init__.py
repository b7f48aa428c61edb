"""Kernels in Triton, imported at the first tensor on a device that it knows."""
