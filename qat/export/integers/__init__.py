"""The integers of a prepared model, layer by layer and quantizer by quantizer; no file format in it."""
