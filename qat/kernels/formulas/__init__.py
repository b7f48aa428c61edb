"""The operators of qat.kernels in plain torch operations: what torch.compile sees of them, and tests compare with.

Each function has the name, arguments and results of its operator. None reads a tensor's value.
"""
