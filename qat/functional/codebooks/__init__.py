"""Estimators whose levels are not evenly spaced: signs, sums of powers of two, floating-point formats."""
