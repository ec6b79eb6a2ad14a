"""AdamA: gradients folded into Adam's moments and released. Imports `_core`, `_jax`, `_states`,
`_stack`, optax.
"""
