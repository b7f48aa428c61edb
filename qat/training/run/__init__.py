"""Files and output of a run: folder, checkpoints, log, proof, exit status."""
