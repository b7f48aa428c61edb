"""The program that evaluates on codes, derived from an `evaluation_copy`."""
