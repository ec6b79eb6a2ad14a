"""Turns a traced step into its profile. It imports `_core`, `_jax`, `_device`, `_codecs` and
`_tags`.
"""
