"""Common code of the command lines: reads a config from a TOML file and overrides, reports errors
in one message, and returns exit codes.
"""
