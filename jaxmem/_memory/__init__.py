"""What a compiled step has in memory, as data, text and JSON. Imports `_core`; free of JAX."""
