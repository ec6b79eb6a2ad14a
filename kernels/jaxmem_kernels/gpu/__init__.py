"""GPU kernels in Triton. Each kernel's results equal a reference of `jaxmem_kernels` bitwise."""
