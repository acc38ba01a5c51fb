"""Kernels of `reference` in Triton, for tensors on a GPU; imported only where there are such tensors."""
