"""Estimates the memory of a step from its trace: which values XLA writes, in which order, and how
many bytes are live at once.

An estimate takes a tenth of a second where a compile takes ten seconds, so that a search
estimates many assignments and compiles few. An estimate is no bound: XLA fuses and schedules by
cost models of its own.
"""
