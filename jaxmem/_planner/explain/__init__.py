"""Names the buffers of a compiled step's memory, at the peak and over the schedule. `build`, the
step's arguments and a plan go in; an `Explanation` comes out (`explain.py`).
"""
