"""What holds a step's peak, by name. Imports `_core`, `_jax`, `_device`, `_xla`, `_profile`,
`_codecs`, `_plan`.
"""
