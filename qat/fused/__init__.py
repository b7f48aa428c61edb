"""Training on codes: makes a training step of a prepared model fast, and checks that it is the same step."""
