"""Compiles programs for the device at hand or for a named one, and runs and times compiled
programs.
"""
