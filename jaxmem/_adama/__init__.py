"""AdamA: its arithmetic, and the optax transformations. Imports `_core`, `_jax`, optax."""
