"""Optimizers that never store a whole gradient: AdamA, an optax transformation (`adama`), and the
released step, a training step that updates each layer in the backward (`released`).
"""
