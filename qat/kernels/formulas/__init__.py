"""The operators of qat.kernels in plain torch operations, for devices without the C kernels.

Each function has the name, arguments and results of its operator. None reads a tensor's value, so none waits for the
device: torch.compile can trace them, and CUDA can record them into a graph.
"""
