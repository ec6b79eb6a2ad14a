"""Compiled programs, and the compiling of them, with or without the device. Imports `_core`,
`_device`, `_jax`.
"""
