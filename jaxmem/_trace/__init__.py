"""Reads and rewrites programs that JAX traced, and estimates their live memory (`liveness`). Most
workarounds for versions of JAX are here.
"""
