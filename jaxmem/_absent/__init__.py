"""Compiles steps for devices that are not there, in processes of their own."""
