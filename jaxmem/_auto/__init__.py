"""Finds blocks in a function that names none; may import `_jax`, `_tags` and `_layer`."""
