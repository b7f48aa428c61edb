"""Kernels in Triton, for devices that it knows; imported at the first tensor on one."""
