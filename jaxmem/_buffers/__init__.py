"""Reads the buffer assignment that XLA writes of a compiled program: what its memories hold, and
when. Imports `errors`.
"""
