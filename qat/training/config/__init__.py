"""A run's YAML file: its schema, how it is read, and plain sentences for its errors."""
