"""Names the buffers of a compiled step's memory, at the peak and over the schedule."""
