"""A run on the disk and on the terminal: its folder and lock, checkpoints, models, curves, proof, report, its end."""
