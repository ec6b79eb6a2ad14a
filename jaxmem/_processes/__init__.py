"""What the processes of a run tell one another, so that they save, go on and end together.

Imports `_core`.
"""
