"""TPU kernels in Pallas. Each kernel's results equal a reference of `jaxmem_kernels` bitwise."""
