"""Operations whose derivative reads their own result, with the tag inside the derivative rule.

`tag(softmax(x))` saves the result and still recomputes it, because the derivative of the softmax
reads the untagged result. Here the forward and the derivative read the tagged result.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem._model.tags.implementation import is_hijax
from jaxmem._model.tags.tag import implementation, tag, tag_params


def wide(dtype) -> jnp.dtype:
    """Returns the dtype to compute in, for values of `dtype`: float32 at least. JAX itself promotes
    no floating-point dtype of 8 bits.
    """
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize >= 4
    return jnp.dtype(dtype if is_wide else jnp.float32)


def self_tagged(forward: Callable, tangent: Callable) -> Callable:
    """Returns `forward` with a tagged result, as a function of (x, name, kind, codec).

    forward: computes y from x.
    tangent: computes the result's tangent from y and x's tangent, both in float32 at least.
    """

    def call(x, name: str, kind: str | None = None, codec: str | None = None):
        if is_hijax():
            params = tag_params(name, kind, codec)
            return implementation().self_tagged_by(forward, of_value(tangent), x, **params)
        return tagged_within(forward, tangent, lambda y: tag(y, name, kind=kind, codec=codec))(x)

    return call


def of_value(tangent: Callable) -> Callable:
    """Returns `tangent` computed in float32 at least, in the dtype of the result."""

    def call(y, t):
        dtype = wide(y.dtype)
        return tangent(y.astype(dtype), t.astype(dtype)).astype(y.dtype)

    return call


def tagged_within(forward: Callable, tangent: Callable, tagging: Callable) -> Callable:
    """Returns `tagging(forward(x))` as a function of x whose derivative reads the tagged result."""

    def call(x):
        tagged = lambda x: tagging(forward(x))
        operation = jax.custom_jvp(tagged)

        @operation.defjvp
        def _(primals, tangents):
            (x,), (t,) = primals, tangents
            y = tagged(x)  # not `operation`: the tag would hide inside custom_jvp_call
            return y, of_value(tangent)(y, t)

        return operation(x)

    return call


def softmax_tangent(y, t, axis):
    """y * (t - <y, t> / sum(y)).

    sum(y) is 1 for an exact softmax; after a lossy codec it is not, and without the division the
    error would be large on peaked rows.
    """
    return y * (t - (y * t).sum(axis, keepdims=True) / y.sum(axis, keepdims=True))


def tanh_tangent(y, t):
    return (1 - y * y) * t


def sigmoid_tangent(y, t):
    return y * (1 - y) * t


def exp_tangent(y, t):
    return y * t
