"""Compiles programs, with or without the device, and reads compiled ones. Imports `_core`,
`_device`, `_jax`.
"""
