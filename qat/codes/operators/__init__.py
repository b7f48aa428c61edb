"""What computes on codes: for each kind its formula, its operator in C, its derivative, and what a graph calls."""
