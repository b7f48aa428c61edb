"""Estimators with uneven levels: signs, sums of powers of two, floats."""
