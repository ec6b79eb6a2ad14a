"""Names what is in memory in a compiled step. Imports `_core`, `_jax`, `_device`, `_hlo`, `_xla`,
`_blocks`, `_profile`, `_codecs`, `_states`, `_joint`, `_plan` and `_memory`.
"""
