"""The data of a run: data sets by name, their images, what is done to them, and batches in an order that is known."""
