"""Reads the buffer assignment that XLA writes for a compiled program. A serialized HLO proto goes
in; the bytes of each memory (`assignment.py`), and the buffers that are live at the peak and over
the schedule (`peak.py`), come out.
"""
