"""CPU kernels: C code, its compiler, its addresses, and oneDNN's integer products."""
