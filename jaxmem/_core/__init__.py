"""The vocabulary of the library: actions, choices, assignments, the profile of a step, byte sizes,
and the cache on disk. This room imports no JAX.

Labels of blocks (`labels.py`) and profiles that are divided into groups of layers (`groups.py`) are
two modules. An assignment needs labels, and a divided profile needs the profile of a step. In one
module, every assignment would depend on the profile.
"""
