"""Operations whose derivative reads their own result, with the tag inside the derivative rule.

`jaxmem.tag(jax.nn.softmax(x), name)` saves the output and still recomputes it, because softmax's
derivative reads the output from before the tag. Here forward and derivative read the tagged one.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem._tags.operations import (
    exp_tangent,
    self_tagged,
    sigmoid_tangent,
    softmax_tangent,
    tanh_tangent,
    wide,
)


def softmax(x, name: str, *, axis: int = -1, codec=None):
    """Softmax of `x` (floating, any shape) along `axis`, in `x`'s dtype, tagged as `name` with kind
    `softmax`.
    """
    forward = functools.partial(jax.nn.softmax, axis=axis)
    tangent = functools.partial(softmax_tangent, axis=axis)
    return _widened(forward, tangent, x, name, "softmax", codec)


def tanh(x, name: str, *, kind: str | None = None, codec=None):
    """Hyperbolic tangent of `x` (floating, any shape), in `x`'s dtype, tagged as `name`."""
    return _widened(jnp.tanh, tanh_tangent, x, name, kind, codec)


def sigmoid(x, name: str, *, kind: str | None = None, codec=None):
    """Logistic function of `x` (floating, any shape), in `x`'s dtype, tagged as `name`."""
    return _widened(jax.nn.sigmoid, sigmoid_tangent, x, name, kind, codec)


def exp(x, name: str, *, kind: str | None = None, codec=None):
    """Exponential of `x` (floating, any shape), in `x`'s dtype, tagged as `name`."""
    return _widened(jnp.exp, exp_tangent, x, name, kind, codec)


def _widened(forward: Callable, tangent: Callable, x, name: str, kind: str | None, codec):
    """`forward` computed in float32 at least, and its result tagged."""
    x = jnp.asarray(x)
    computed = lambda x: forward(x.astype(wide(x.dtype))).astype(x.dtype)
    return self_tagged(computed, tangent)(x, name, kind, codec and str(codec))
