"""Estimates the memory of a step from its trace: which values XLA writes, in which order it runs,
and how many bytes are alive at once.
"""
