"""Searches for a plan: solves for what may fit, compiles it, learns from its bytes, solves again.
Imports `_core`, `_device`, `_profile`, `_solver`, `_trials`, `_xla`.
"""
