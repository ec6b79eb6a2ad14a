"""Chooses the tensors of one layer that are worth an action, and tags them."""
