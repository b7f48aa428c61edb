"""A run's files and output: folder and lock, checkpoints, weights, log, proof, report, and the exit status."""
