"""Operations with a tag inside their derivative rule, so that the backward reads the tagged result.

The derivative of softmax, tanh, sigmoid and exp reads the result of the operation. In
`jaxmem.tag(jax.nn.softmax(x), name)`, the derivative reads the result from before the tag. The
backward then recomputes the softmax although the tagged result is saved. In the functions of this
module, the forward and the derivative read the tagged result.
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
from jaxmem._model.tags.residuals import compress_residuals as compress_residuals
from jaxmem._model.tags.saved import of_arrays, tagging
from jaxmem._model.tags.tag import check_name
from jaxmem.errors import TagError


def softmax(x, name: str, *, axis: int = -1, codec=None):
    """Computes the softmax of `x` along an axis, and tags the result with kind `softmax`.

    x: a floating-point array of any shape. The result has the shape and dtype of `x`.
    name: the tag's name.
    axis: the axis along which the result sums to 1. The default is the last axis.
    codec: the codec, or its text form, that compresses the result. None means the codec of kind
      `softmax`.

    Raises TagError for an invalid name or codec, as `jaxmem.tag` does.
    """
    forward = functools.partial(jax.nn.softmax, axis=axis)
    tangent = functools.partial(softmax_tangent, axis=axis)
    return _widened(forward, tangent, x, name, "softmax", codec)


def tanh(x, name: str, *, kind: str | None = None, codec=None):
    """Computes the hyperbolic tangent of `x`, and tags the result.

    x: a floating-point array of any shape. The result has the shape and dtype of `x`.
    name: the tag's name.
    kind: the kind of tensor, one of `jaxmem.codecs.KINDS`, which selects the codec. None means no
      kind.
    codec: the codec, or its text form, that compresses the result. None means the codec of the
      kind.

    Raises TagError for an invalid name, kind or codec, as `jaxmem.tag` does, and for integers.
    """
    return _widened(jnp.tanh, tanh_tangent, x, name, kind, codec)


def sigmoid(x, name: str, *, kind: str | None = None, codec=None):
    """Computes the logistic function of `x`, and tags the result.

    x: a floating-point array of any shape. The result has the shape and dtype of `x`.
    name: the tag's name.
    kind: the kind of tensor, one of `jaxmem.codecs.KINDS`, which selects the codec. None means no
      kind.
    codec: the codec, or its text form, that compresses the result. None means the codec of the
      kind.

    Raises TagError for an invalid name, kind or codec, as `jaxmem.tag` does, and for integers.
    """
    return _widened(jax.nn.sigmoid, sigmoid_tangent, x, name, kind, codec)


def exp(x, name: str, *, kind: str | None = None, codec=None):
    """Computes the exponential of `x`, and tags the result.

    x: a floating-point array of any shape. The result has the shape and dtype of `x`.
    name: the tag's name.
    kind: the kind of tensor, one of `jaxmem.codecs.KINDS`, which selects the codec. None means no
      kind.
    codec: the codec, or its text form, that compresses the result. None means the codec of the
      kind.

    Raises TagError for an invalid name, kind or codec, as `jaxmem.tag` does, and for integers.
    """
    return _widened(jnp.exp, exp_tangent, x, name, kind, codec)


def name_residuals(f: Callable, name: str) -> Callable:
    """Returns `f` with one tag for all tensors that the derivative of `f` saves.

    Use `name_residuals` for a function with its own derivative rule, such as an attention kernel.
    The rule saves the kernel's result and the sums of its rows. A tag on the result alone does not
    save the backward a second run of the kernel. `jaxmem.auto` tags such tensors without
    `name_residuals`.

    f: a function that is differentiable in reverse mode. Its arguments and its result are pytrees.
      Leaves that are not arrays are passed to `f` unchanged. The arguments of `f`, and the arrays
      that `f` closes over, get no tag.
    name: the name of the saved tensors in plans. A plan keeps, offloads or recomputes these tensors
      together. Their kind is `exact`, so a plan compresses them only if its codecs name this kind.

    Raises TagError if `name` is not a valid name of a tag.
    """
    check_name("name_residuals", name)

    @functools.wraps(f)
    def call(*args, **kwargs):
        function, arrays, closed_over = of_arrays(f, args, kwargs)
        return tagging(function, name)(*arrays, *closed_over)

    return call


def _widened(forward: Callable, tangent: Callable, x, name: str, kind: str | None, codec):
    """Computes `forward` in float32 at least, and tags its result. Raises TagError for integers and
    booleans, to which the result could not be rounded.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TagError(
            f"jaxmem.ops: `x` of the tag {name!r} has dtype {x.dtype}; expected a floating-point"
            " array, such as x.astype(jnp.float32)"
        )
    computed = lambda x: forward(x.astype(wide(x.dtype))).astype(x.dtype)
    return self_tagged(computed, tangent)(x, name, kind, codec and str(codec))
