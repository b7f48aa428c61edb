"""The kernels as operators of torch, one file for each kind of computation: what `qat.fused` calls."""
