"""Kernels for GPUs in Triton. Each computes what a reference of `jaxmem_kernels` computes."""
