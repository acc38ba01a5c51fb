"""Kernels of `reference` for tensors on a GPU, in Triton or CUDA C++; imported only where there are such tensors."""
