"""The vocabulary of the library: actions, choices, assignments, groups of layers, the types of a
profile, byte sizes, the database of measured times and compiles, and helpers for lists, graphs and
tables.

All other rooms use these types. This room imports no JAX, so that plans' files can be read, and
profiles solved for assignments, without JAX.
"""
