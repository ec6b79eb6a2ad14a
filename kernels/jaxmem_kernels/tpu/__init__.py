"""Kernels for TPUs in Pallas. Each computes what a reference of `jaxmem_kernels` computes."""
