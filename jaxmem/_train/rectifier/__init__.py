"""Counts outlier channels of tagged tensors while a model trains, and plans again where the counts
or the times have changed (Adacc 3.4).
"""
