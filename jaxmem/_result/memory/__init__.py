"""The memory of a compiled step, as data, text and JSON. This folder imports no JAX."""
