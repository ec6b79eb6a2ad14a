"""Compiles programs, with or without the device, and runs them. Imports `_core`, `_device`, `_hlo`,
`_jax`.
"""
