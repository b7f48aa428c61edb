"""YAML file of a run: its schema, its reader, and plain sentences for errors."""
