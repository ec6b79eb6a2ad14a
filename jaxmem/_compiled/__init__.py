"""Reads what a compile of a step says. Imports `_core`, `_device`, `_hlo`, `_jax`."""
