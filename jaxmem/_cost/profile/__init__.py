"""Prices the blocks of a traced step in bytes and seconds: the profile."""
