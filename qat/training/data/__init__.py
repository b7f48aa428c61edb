"""Data of a run: data sets, preprocessing, augmentation, reproducible batches."""
