"""CPU kernels: C code, its compiler and the one file that gives it addresses; and oneDNN's integer products."""
