"""The kernels of the CPU: C code with its compiler and its one door for addresses, and oneDNN's integer products."""
