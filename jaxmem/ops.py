"""Operations whose derivative reads what they compute, with the tag inside the derivative rule.

`jaxmem.tag(jax.nn.softmax(x), name)` saves the output and still recomputes it, because softmax's
derivative reads the output from before the tag. Here forward and derivative read the tagged one.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem._model.tags.operations import (
    exp_tangent,
    self_tagged,
    sigmoid_tangent,
    softmax_tangent,
    tanh_tangent,
    wide,
)
from jaxmem._model.tags.saved import of_arrays, tagging
from jaxmem._model.tags.tag import check_name


def softmax(x, name: str, *, axis: int = -1, codec=None):
    """Computes the softmax of `x` along an axis, and tags it with kind `softmax`.

    x: floating, of any shape; the result has its shape and dtype.
    name: the tag's name.
    axis: the axis along which the result adds up to 1.
    codec: what compresses the result, as a codec or its text; None means the default for its kind.

    Raises TagError as `jaxmem.tag` does.
    """
    forward = functools.partial(jax.nn.softmax, axis=axis)
    tangent = functools.partial(softmax_tangent, axis=axis)
    return _widened(forward, tangent, x, name, "softmax", codec)


def tanh(x, name: str, *, kind: str | None = None, codec=None):
    """Computes the hyperbolic tangent of `x`, and tags it.

    x: floating, of any shape; the result has its shape and dtype.
    name: the tag's name.
    kind: what the tensor is (`jaxmem.codecs.KINDS`), which decides its default codec.
    codec: what compresses the result, as a codec or its text; None means the default for its kind.

    Raises TagError as `jaxmem.tag` does.
    """
    return _widened(jnp.tanh, tanh_tangent, x, name, kind, codec)


def sigmoid(x, name: str, *, kind: str | None = None, codec=None):
    """Computes the logistic function of `x`, and tags it.

    x: floating, of any shape; the result has its shape and dtype.
    name: the tag's name.
    kind: what the tensor is (`jaxmem.codecs.KINDS`), which decides its default codec.
    codec: what compresses the result, as a codec or its text; None means the default for its kind.

    Raises TagError as `jaxmem.tag` does.
    """
    return _widened(jax.nn.sigmoid, sigmoid_tangent, x, name, kind, codec)


def exp(x, name: str, *, kind: str | None = None, codec=None):
    """Computes the exponential of `x`, and tags it.

    x: floating, of any shape; the result has its shape and dtype.
    name: the tag's name.
    kind: what the tensor is (`jaxmem.codecs.KINDS`), which decides its default codec.
    codec: what compresses the result, as a codec or its text; None means the default for its kind.

    Raises TagError as `jaxmem.tag` does.
    """
    return _widened(jnp.exp, exp_tangent, x, name, kind, codec)


def name_residuals(f: Callable, name: str) -> Callable:
    """Returns `f` with one name for all that its derivative saves beside its arguments, so that a
    plan decides it.

    It is for calls with a derivative rule of their own, such as an attention kernel: the rule saves
    its result and the sums of its rows, and a tag on the result spares no second run of the kernel.
    `jaxmem.auto` does this by itself.

    f: any differentiable function, for reverse mode. Its arguments and its result are pytrees; what
      is no array it gets unchanged.
    name: what plans call these tensors, of kind `exact`: they are kept, offloaded or recomputed
      together.

    Raises TagError if `name` is no tag's.
    """
    check_name("name_residuals", name)

    @functools.wraps(f)
    def call(*args, **kwargs):
        function, arrays, closed_over = of_arrays(f, args, kwargs)
        return tagging(function, name)(*arrays, *closed_over)

    return call


def _widened(forward: Callable, tangent: Callable, x, name: str, kind: str | None, codec):
    """Computes `forward` in float32 at least, and tags its result."""
    x = jnp.asarray(x)
    computed = lambda x: forward(x.astype(wide(x.dtype))).astype(x.dtype)
    return self_tagged(computed, tangent)(x, name, kind, codec and str(codec))
