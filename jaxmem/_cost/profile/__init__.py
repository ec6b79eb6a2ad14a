"""Prices the blocks of a traced step in bytes and seconds. A jaxpr, the target's `Pricing` and the
allowed actions go in; a `Profile` comes out (`profile.py`).

Prices are first made with work in the place of seconds (`options.py`, `price.py`). Equal work is
listed once (`jobs.py`), all work is timed at once (`times.py`), and the seconds replace the work.
"""
