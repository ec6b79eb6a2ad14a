"""Finds blocks in a function that names none; may import `_jax`, `_tags`, `_blocks` and
`_layer`.
"""
