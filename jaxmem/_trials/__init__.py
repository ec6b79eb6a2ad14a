"""What a search knows of one step: what it compiled, how long that takes, what walks expect of the
rest. Imports `_compiled`, `_jax`, `_device`, `_xla`, `_liveness`, `_profile`, `_solver`.
"""
