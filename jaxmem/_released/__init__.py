"""The released step: a backward that uses each layer's gradient and lets it go. Imports `_core`,
`_jax`, `_device`, `_states`, `_stack`, `_adama`, optax.
"""
