"""Models on uint8 codes: training and evaluation in fewer passes over memory.

`operators/` computes: an operator a file, with its formula, C and derivative in the order in which they run.
`training/` derives the graph that trains on codes, `evaluation/` the program that evaluates on them, `check/` compares
a training step with the plain one, and `graph.py` decides at every call. Delete this folder and everything still runs,
only slower.
"""
