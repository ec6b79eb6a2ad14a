"""The plan: its data, its file, its text and its page."""
