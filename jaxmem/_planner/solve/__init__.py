"""Finds the fastest assignment of actions for a profile within limits, by a mixed-integer program.
This part imports no JAX.
"""
