"""Compiles programs for the device at hand or for a named device, and runs and times compiled
programs. Searches call the interface `Backend` (`protocol.py`), which `backend.py` implements.
"""
