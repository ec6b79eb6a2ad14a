"""Names the contents of memory of a compiled step, at its peak and over its schedule."""
