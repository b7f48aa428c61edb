"""The data of a run: data sets by name, images, preprocessing and augmentation, and batches in a reproducible order."""
