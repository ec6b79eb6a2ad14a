"""Prices actions that were written by hand."""
