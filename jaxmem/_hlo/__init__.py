"""Reads the texts of compiled programs: their matrix products, estimates of their time, what they
move. Imports `_core`, `_device`.
"""
