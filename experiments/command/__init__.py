"""The command lines' common part: settings read from TOML and overrides, errors in one line, exit
codes.
"""
