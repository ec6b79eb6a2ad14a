"""Names what holds the peak of a step's memory. Imports `_core`, `_jax`, `_device`, `_xla`,
`_profile`, `_codecs`, `_plan`.
"""
