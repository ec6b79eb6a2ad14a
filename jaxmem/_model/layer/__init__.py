"""Makes a block of one layer without tags. A layer's program goes in. Its tensors that are worth an
action are chosen (`candidates.py`) and tagged, and a function under `jax.checkpoint` with a plan's
policy comes out (`block.py`).
"""
