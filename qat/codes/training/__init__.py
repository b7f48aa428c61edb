"""The graph that trains on codes, derived from a prepared graph."""
