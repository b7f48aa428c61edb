"""Measurements and the model definitions that they need; no part of the installed package."""
