"""Tells which channels of tagged tensors are outliers while a model trains, and what a plan should
do about it (Adacc 3.4).
"""
