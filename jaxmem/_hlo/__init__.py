"""Reads compiled programs: their matrix products, XLA's estimates of time, what their buffers hold.
Imports `_core`, `_device`.
"""
