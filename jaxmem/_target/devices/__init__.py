"""GPUs and TPUs that a step can be planned for: memory, rates of compute and of transfers, and the
actions that each device supports. A name goes in; a `Target` comes out (`target.py`).
"""
