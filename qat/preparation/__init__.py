"""From a traced float model to a quantized one."""
