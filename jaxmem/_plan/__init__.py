"""What was decided: the plan, its file, its text. Imports `_core` and `_codecs`."""
