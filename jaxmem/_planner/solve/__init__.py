"""Finds the fastest assignment of actions for a profile within byte limits, by a mixed-integer
program. An `ActionProblem` goes in; an `ActionSolution`, or None if nothing fits, comes out
(`solve.py`). This folder imports no JAX.
"""
