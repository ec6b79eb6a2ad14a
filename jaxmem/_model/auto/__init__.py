"""`jaxmem.auto`: finds the layers of a function that has no tags, and makes each layer a block.

`auto` rewrites the loss before it is differentiated. The alternative is to rewrite the step after
differentiation. Only before differentiation do layers have a derivative of their own to decide
about. Only then can a tag be placed where the derivative reads the tensor: inside the rule of a
softmax or of a tanh.

A program is inlined, except for calls that bring a derivative of their own. So the user's
operations run as they are, and results are equal to the last bit.

The layers of a Python loop that are equal get the candidates of the second layer, by position.
Names are then equal by construction, and the candidates are searched for once.

`auto(loss, None)` is the loss itself, so that the baseline is the user's own step.
"""
