"""The float model that a run starts from, and its weights."""
