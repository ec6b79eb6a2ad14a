"""Reads the text of compiled programs: matrix products, time estimates, transfers, collectives."""
