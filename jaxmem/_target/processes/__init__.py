"""Signals of a process (`signals.py`), and messages and agreement between the processes of one run
(`channel.py`, `pace.py`), so that all processes save, continue and end at the same step.
"""
