"""Finds blocks and tags in a function that names none; may import `_jax` and `_tags`."""
