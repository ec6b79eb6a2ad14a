"""The released step: its backward pass updates each layer as soon as the layer's gradient exists,
and then frees the gradient. An optimizer and a model go in; a training step comes out.

A released step takes a model as three functions: embed, block and head. The traces of `embed` and
`head` show which arrays outside the layers each function reads. So tied embeddings need no argument
from the user.

An optimization barrier delays a fold until its gradient exists. Without the barrier, XLA reads a
layer's moments together with the layer's parameters, and stores both during the layer's backward.

States stream if their arrays are stored in host memory. The alternative is an argument of the step.
The types of arrays show the memory of each array, under `jax.jit` too. So a changed placement needs
no new step, and the types of a state's arrays describe the placement.
"""
