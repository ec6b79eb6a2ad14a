"""Finds the blocks of a traced step, and the values that their backward passes read."""
