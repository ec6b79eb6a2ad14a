"""The vocabulary of the library: actions, choices, assignments, the profile of a step, byte sizes,
and the cache on disk. This room imports no JAX.
"""
