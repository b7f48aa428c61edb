"""The Functions of training on codes, and the functions that a fused graph calls."""
