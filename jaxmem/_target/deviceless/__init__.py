"""Compiles programs for GPUs and TPUs that the machine does not have, in child processes. A child
process can load one device's compiler plugin without changing the JAX of the parent.
"""
