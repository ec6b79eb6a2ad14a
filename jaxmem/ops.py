"""Operations whose derivative reads their own output, with the tag inside the derivative rule.

`jaxmem.tag(jax.nn.softmax(x), name)` saves the output and still recomputes it, because softmax's
derivative reads the output from before the tag. Here forward and derivative read the tagged one.
"""

import functools

import jax
import jax.numpy as jnp

from jaxmem._tags.tag import tag


def _wide(dtype):
    """The dtype to compute in: `dtype`, or float32 if that has fewer bits."""
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def _self_tagged(forward, tangent):
    """Returns a tagged `forward(x, *static)` whose tangent is `tangent(y, t, *static)`, where y is
    the tagged output. Both are computed in float32 at least.
    """

    def tagged(x, name, kind, codec, static):
        wide = _wide(x.dtype)
        return tag(forward(x.astype(wide), *static).astype(x.dtype), name, kind=kind, codec=codec)

    operation = functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))(tagged)

    @operation.defjvp
    def _(name, kind, codec, static, primals, tangents):
        (x,), (t,) = primals, tangents
        # Not `operation`: the tag would hide inside a custom_jvp_call. The tangent must read what
        # the tag returns, or the backward would need the output from before it.
        y = tagged(x, name, kind, codec, static)
        wide = _wide(x.dtype)
        return y, tangent(y.astype(wide), t.astype(wide), *static).astype(x.dtype)

    return operation


def _softmax_tangent(y, t, axis):
    """y * (t - <y, t> / sum(y)).

    sum(y) is 1 for an exact softmax; after a lossy codec it is not, and without the division the
    error would be large on peaked rows.
    """
    return y * (t - (y * t).sum(axis, keepdims=True) / y.sum(axis, keepdims=True))


_softmax = _self_tagged(
    lambda x, axis: jax.nn.softmax(x, axis=axis),
    _softmax_tangent,
)
_tanh = _self_tagged(jnp.tanh, lambda y, t: (1 - y * y) * t)
_sigmoid = _self_tagged(jax.nn.sigmoid, lambda y, t: y * (1 - y) * t)
_exp = _self_tagged(jnp.exp, lambda y, t: y * t)


def softmax(x, name: str, *, axis: int = -1, codec=None):
    """Computes the softmax of `x` along an axis, and tags it with kind `softmax`.

    x: floating, of any shape; the result has its shape and dtype.
    name: the tag's name.
    axis: the axis along which the result adds up to 1.
    codec: what compresses the result, as a codec or its text; None means the default for its kind.

    Raises TagError as `jaxmem.tag` does.
    """
    return _softmax(jnp.asarray(x), name, "softmax", codec and str(codec), (axis,))


def tanh(x, name: str, *, kind: str | None = None, codec=None):
    """Computes the hyperbolic tangent of `x`, and tags it.

    x: floating, of any shape; the result has its shape and dtype.
    name: the tag's name.
    kind: what the tensor is (`jaxmem.codecs.KINDS`), which decides its default codec.
    codec: what compresses the result, as a codec or its text; None means the default for its kind.

    Raises TagError as `jaxmem.tag` does.
    """
    return _tanh(jnp.asarray(x), name, kind, codec and str(codec), ())


def sigmoid(x, name: str, *, kind: str | None = None, codec=None):
    """Computes the logistic function of `x`, and tags it.

    x: floating, of any shape; the result has its shape and dtype.
    name: the tag's name.
    kind: what the tensor is (`jaxmem.codecs.KINDS`), which decides its default codec.
    codec: what compresses the result, as a codec or its text; None means the default for its kind.

    Raises TagError as `jaxmem.tag` does.
    """
    return _sigmoid(jnp.asarray(x), name, kind, codec and str(codec), ())


def exp(x, name: str, *, kind: str | None = None, codec=None):
    """Computes the exponential of `x`, and tags it.

    x: floating, of any shape; the result has its shape and dtype.
    name: the tag's name.
    kind: what the tensor is (`jaxmem.codecs.KINDS`), which decides its default codec.
    codec: what compresses the result, as a codec or its text; None means the default for its kind.

    Raises TagError as `jaxmem.tag` does.
    """
    return _exp(jnp.asarray(x), name, kind, codec and str(codec), ())
