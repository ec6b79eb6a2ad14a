"""Prices and estimates assignments that a user wrote."""
