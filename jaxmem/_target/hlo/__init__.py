"""Reads the text of compiled programs (`text.py`). The text of an optimized HLO module goes in;
FLOPs, seconds, host transfers and collectives come out.
"""
