"""A run on many ranks: the process group, each rank's share of the data, the gradients, and how they end together."""
