"""Traces steps (`step.py`), reads and rewrites traced programs, and estimates their live memory
(`liveness`). `build` and arguments go in; jaxprs, facts about jaxprs, and rewritten functions come
out. Most workarounds for versions of JAX are in this room.
"""
