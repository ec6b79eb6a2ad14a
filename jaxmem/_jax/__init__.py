"""Reads and changes traced programs, and holds the workarounds for versions of JAX. It imports
`_core` and `jaxmem_kernels`.
"""
