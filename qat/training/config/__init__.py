"""The YAML file of a run: its schema, how it is read, and what is wrong with it in plain sentences."""
