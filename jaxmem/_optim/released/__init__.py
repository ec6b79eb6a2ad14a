"""The released step: its backward pass updates each layer as soon as the layer's gradient exists,
and then frees the gradient.

A released step takes a model as three functions: embed, block and head. The arrays outside the
layers are distinguished by which of them `embed` and `head` read, in the traces of these functions.
So tied embeddings need no argument from the user.

A fold waits for its gradient behind an optimization barrier. Without the barrier, XLA reads a
layer's moments together with its parameters, and holds both through the layer's backward.

States stream if their arrays are stored in host memory. The alternative is an argument of the step.
The types of arrays show the memory of each array, under `jax.jit` too. So a changed placement needs
no new step, and a state describes itself.
"""
