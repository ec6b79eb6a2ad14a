"""Reads and changes traced programs. The home of workarounds for versions of JAX. Imports
`_core`.
"""
