"""Searches for what layers do and where their states lie, together: solves, walks and compiles in
turns.
"""
