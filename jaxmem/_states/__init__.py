"""Where model states lie while a step runs. Imports `_core`, `_jax` and `_device`."""
