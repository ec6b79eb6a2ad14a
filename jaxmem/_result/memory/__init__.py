"""The memory of a compiled step as data, text and JSON: buffers at the peak (`explanation.py`),
live bytes over the schedule (`live.py`), and host transfers (`moved.py`). This folder
imports no JAX.
"""
