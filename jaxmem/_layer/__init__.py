"""Picks what is worth deciding in one layer; may import `_jax` and `_tags`."""
