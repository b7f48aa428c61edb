"""The aids of a stage, a file for each block of the config: what `train.py` builds from it, and what it says."""
