"""HTML pages about plans and runs."""
