"""Reads the buffer assignment that XLA writes for a compiled program: which buffers a memory holds,
and when.
"""
