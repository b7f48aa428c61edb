"""The training script's parts: config, data, training loop, run files. The library does not know this package."""
