"""Finds the blocks of a traced step, and reads what their backward needs. It imports `_core`,
`_jax` and `_tags`.
"""
