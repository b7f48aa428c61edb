"""Training on codes: what makes a training step of a prepared model fast, and the proof that it is the same step."""
