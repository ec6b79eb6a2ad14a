"""A run: its plan, its folder, its progress. Imports `steps` and all below."""
