"""Holds states on the disk: what is whole is known to be, and goes on wherever arrays lie."""
