"""Finds the fastest assignment of actions for a profile within limits. It is free of JAX, and
imports `_core` alone.
"""
