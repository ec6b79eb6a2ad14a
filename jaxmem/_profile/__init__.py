"""Prices the blocks of a traced step: its profile. It imports `_core`, `_jax`, `_device`,
`_codecs`, `_tags` and `_blocks`.
"""
