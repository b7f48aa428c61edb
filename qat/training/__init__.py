"""Parts of the training script; the library does not import them."""
