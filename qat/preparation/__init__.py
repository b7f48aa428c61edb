"""From a traced float model to a quantized one: twins, functional weights, placement of quantizers, parts."""
