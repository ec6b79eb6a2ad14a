"""Where model states lie while a step runs. Imports `_core` and `_jax`."""
