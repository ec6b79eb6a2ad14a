"""Signals of a process, and agreement between the processes of one run, so that all of them save,
continue and end at the same step.
"""
