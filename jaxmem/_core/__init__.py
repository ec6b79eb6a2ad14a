"""Words and small tools that every other package may import. Free of JAX; imports `jaxmem.errors`
alone.
"""
