"""Finds the fastest assignment of actions for a profile within byte limits, by a mixed-integer
program. This folder imports no JAX.
"""
