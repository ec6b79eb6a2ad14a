"""The loop over identical layers, with a backward of its own. Imports `_core`, `_jax`, `_tags`,
`_states`.
"""
