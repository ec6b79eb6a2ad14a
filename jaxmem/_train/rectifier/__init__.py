"""Counts outlier channels of tagged tensors during training, and plans again if the counts or the
step times have changed (Adacc §3.4). A plan and its `build` go in; new plans, and rows of counts
and of decisions, come out (`rectify.py`).
"""
