"""The autograd Functions on codes, and the functions that a fused graph calls."""
