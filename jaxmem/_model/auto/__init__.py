"""`jaxmem.auto`: finds the layers of a function that has no tags, and makes each layer a block. A
loss or a training step goes in; the function with its layers under a plan's policy comes out.

`auto` rewrites the loss before differentiation. The alternative is to rewrite the step after
differentiation. Only before differentiation has each layer a derivative of its own, whose saved
tensors a plan can choose. Only then can a tag be placed inside the derivative rule of a softmax or
of a tanh, where the derivative reads the tensor.

A program is inlined, except for calls with a derivative rule of their own. So the user's operations
run unchanged, and results are equal to the last bit.

Equal layers of a Python loop share the candidates of the second layer, matched by position. So
their tags have equal names by construction, and only one layer is searched for candidates.

What does not repeat is cut into pieces. The alternative is a checkpoint for each of the user's
functions or modules. Their ends are not where few bytes cross, and a trace does not show them all.
A checkpoint of the user that holds no part of a layer or piece becomes a piece.

`auto(loss, None)` is the loss itself, so that the baseline is the user's own step.
"""
