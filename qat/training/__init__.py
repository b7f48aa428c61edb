"""The training script's parts: config, data, models, engine, optimizer, checkpoint, logging.

This package knows the library; the library does not know it.
"""
