"""What is drawn of a run's results."""
