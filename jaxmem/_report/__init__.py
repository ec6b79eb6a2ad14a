"""The HTML page about plans and runs. Imports `_core`, `_plan` and `_runs`."""
