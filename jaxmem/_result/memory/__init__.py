"""What a compiled step holds in memory, as data, text and JSON. This part imports no JAX."""
