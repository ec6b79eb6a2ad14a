"""AdamA, and the released step of any optimizer. Imports `_core`, `_jax`, `_states`,
`_stack`, optax.
"""
