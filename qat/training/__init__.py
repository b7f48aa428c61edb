"""The training script's parts: config, data, the training loop, and the run's files.

This package knows the library; the library does not know it.
"""
