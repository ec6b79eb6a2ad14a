"""The released step: its backward pass updates each layer as soon as the layer's gradient exists,
and then frees the gradient.
"""
