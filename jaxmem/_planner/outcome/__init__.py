"""Makes the `Plan` of a finished search, with its table and its curve. `searched.py` reads a search
over actions, and `placed.py` a search over placements.
"""
