"""The fake-quantizer on CUDA, in Triton."""
