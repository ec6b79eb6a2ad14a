"""Codecs, which store a tensor in fewer bytes. `encode` makes codes from a tensor; `decode` makes
the tensor from codes, a shape and a dtype (`base.py`). `registry.py` finds a codec by its text form
or by the kind of a tensor. Importing these files imports no JAX, for the reason in `base.py`.
"""
