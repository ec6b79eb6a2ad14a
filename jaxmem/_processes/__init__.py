"""What a process hears of signals and of the other processes of its run, so that all of them save,
go on and end together.

Imports nothing of jaxmem but its errors.
"""
