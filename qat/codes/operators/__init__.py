"""Operators on codes: formula, C, derivative, and what a graph calls, by kind."""
