"""Parts of the training script: config, data, loop, run files, report.

The library does not import this package.
"""
