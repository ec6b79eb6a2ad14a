"""Reads bytes, FLOPs and transfers of a compiled step."""
