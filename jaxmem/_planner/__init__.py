"""Finds a plan. `plan.py`, `verify.py`, `hand` and `explain` are what users call; `search` and
`joint` are the two searches, over actions and over placements; `solve` and `placement` are the
mixed-integer programs that the searches ask; `trials` holds what a search has compiled, and
`outcome` makes the plan or the error.
"""
