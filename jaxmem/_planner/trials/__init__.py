"""What a search knows of one step: its compiles, their times, and liveness estimates of assignments
that were not compiled.
"""
