"""Kernels for GPUs in Triton, each beside a reference of the package above."""
