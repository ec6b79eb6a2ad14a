"""Operations whose derivative reads their own output, with the tag inside the derivative rule.

`jaxmem.tag(jax.nn.softmax(x), name)` saves the output and still recomputes it, because softmax's
derivative reads the output from before the tag. Here forward and derivative read the tagged one.
"""

import functools

import jax
import jax.numpy as jnp

from jaxmem._tags.tag import tag


def _wide(dtype):
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def _self_tagged(forward, tangent):
    """A tagged `forward(x, *static)` whose tangent is `tangent(y, t, *static)`, both computed in
    float32 at least.
    """

    def tagged(x, name, kind, codec, static):
        wide = _wide(x.dtype)
        return tag(forward(x.astype(wide), *static).astype(x.dtype), name, kind=kind, codec=codec)

    operation = functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))(tagged)

    @operation.defjvp
    def _(name, kind, codec, static, primals, tangents):
        (x,), (t,) = primals, tangents
        # not `operation`: the tag would hide inside custom_jvp_call
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
    """Softmax of `x` (floating, any shape) along `axis`, in `x`'s dtype, tagged as `name` with kind
    `softmax`.
    """
    return _softmax(jnp.asarray(x), name, "softmax", codec and str(codec), (axis,))


def tanh(x, name: str, *, kind: str | None = None, codec=None):
    """Hyperbolic tangent of `x` (floating, any shape), in `x`'s dtype, tagged as `name`."""
    return _tanh(jnp.asarray(x), name, kind, codec and str(codec), ())


def sigmoid(x, name: str, *, kind: str | None = None, codec=None):
    """Logistic function of `x` (floating, any shape), in `x`'s dtype, tagged as `name`."""
    return _sigmoid(jnp.asarray(x), name, kind, codec and str(codec), ())


def exp(x, name: str, *, kind: str | None = None, codec=None):
    """Exponential of `x` (floating, any shape), in `x`'s dtype, tagged as `name`."""
    return _exp(jnp.asarray(x), name, kind, codec and str(codec), ())
