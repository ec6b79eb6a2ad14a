"""AdamA: its arithmetic, and the optax transformations. Gradients of microbatches go in and are
folded into Adam's moments; an update of the parameters comes out once a minibatch.

AdamA is one rule with three users: the optax transformation (`transform.py`), the fold of the
released step, and a user's own loop. `rule.py` has the arithmetic. `adama` returns an optax
transformation with the rule as an attribute. So a released step distinguishes AdamA from other
transformations, which take no microbatches.

The numbers of the row ratio (`ratio.py`) are one array for all layers, on the device, whatever
memory stores the layers' states. The alternative is to store these numbers with the layers; 8 bytes
a row are not worth a transfer. So `split` does not move them, and a checkpoint has one form of
them.
"""
