"""What every estimator does besides its formula: its arguments, its tensors, its scales, and forward mode."""
