"""Checkpoints on disk: saved states, and the digests by which a whole checkpoint is known."""
