"""`jaxmem.stack`: the loop over equal layers, with a backward pass of its own. A layer's function,
stacked parameters and an input x go in; the last layer's output comes out. `stack.py` explains the
backward pass, and `loops.py` how loops pass fetched layers on.
"""
