"""A run's folder: what is written there, and how it is read.

Imports `_core`, `_plan` and `_memory`.
"""
