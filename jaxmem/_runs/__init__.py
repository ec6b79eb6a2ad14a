"""A run: the loop that loses nothing, its checkpoints, and its folder.

Imports `_core`, `_plan`, `_memory` and `_processes`.
"""
