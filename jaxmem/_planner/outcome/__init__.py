"""Makes the result of a finished search: a `Plan` with its table and its curve, or the error that
names the least bytes. `searched.py` reads a search over actions, and `placed.py` a search over
placements.
"""
