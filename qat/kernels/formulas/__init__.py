"""The operators of qat.kernels in plain torch operations, for every device that the C kernels do not run on.

Each function has the name, the arguments and the results of its operator. None of them asks a tensor for a value, so
that none waits for the device: torch.compile takes them into a graph, and CUDA records them into one.
"""
