"""What a plan does inside the user's program: tags and policies. Imports `_core` and `_codecs`."""
