"""AdamA: its arithmetic, and the optax transformations.

AdamA is one rule with three users. `rule.py` is the arithmetic; the optax transformation, the fold
of the released step and a user's own loop call it. `adama` returns an optax transformation that
carries the rule. So a released step can tell AdamA from any other transformation, which has no
microbatches.

The numbers of the row ratio (`ratio.py`) are one array for all layers, on the device, wherever the
states of the layers are stored. The alternative is to place them with the layers; 8 bytes a row are
not worth a copy. So `split` does not touch them, and a checkpoint holds them in one form.
"""
