"""Compiles programs for GPUs and TPUs that the machine does not have, in child processes. A child
process can load one device's compiler plugin without changing the JAX of the parent.

A child process receives each step through `jax.export`. So the user sets no environment variable,
two steps compile at the same time, and a crash of the compiler becomes an error message.
"""
