"""`jaxmem.compress_residuals`: compresses the tensors that the backward of a function reads.

`compress_residuals` serves functions outside `jax.checkpoint`, and functions whose `jax.custom_vjp`
rule chooses the residuals.
"""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmem._model.codecs.base import FLOATS, Codec
from jaxmem._model.codecs.mask import BitMask
from jaxmem._model.codecs.registry import parse
from jaxmem._model.tags.primitive import differentiable_once
from jaxmem._model.tags.saved import of_arrays, saving
from jaxmem.errors import TagError

TWICE = (
    "compress_residuals: differentiated twice, and codes have no derivative; expected one"
    " derivative of it:"
    " leave the function as it is where a second one is taken, or recompute it with jax.checkpoint"
)
# from a residual's shape and dtype to its codec, or None to store it uncompressed
Choose = Callable[[jax.ShapeDtypeStruct], Codec | None]


def compress_residuals(
    f: Callable, codec: Codec | str | Choose, *, keep_args: tuple[int, ...] | None = None
) -> Callable:
    """Returns a function equal to `f` whose `jax.vjp` stores compressed residuals for the backward.

    The value is the value of `f`, bit for bit. The gradient is the gradient of `f` at the decoded
    residuals. The returned function runs under jit, grad, vmap and scan, in reverse mode.

    f: a differentiable function. Its arguments are pytrees of `jax.Array`s and of other leaves,
      such as Python numbers and text. Floating-point arrays have a gradient. Leaves that are not
      arrays are passed to `f` unchanged. Arrays that `f` closes over are not compressed.
    codec: the codec of each residual. A codec, or its text form, compresses every floating-point
      residual that the codec makes smaller. A function receives a residual's
      `jax.ShapeDtypeStruct`, and returns the residual's codec, or None to leave the residual
      uncompressed. Boolean residuals, such as dropout masks, are stored with one bit per value,
      unless the function returns another codec for them. Integers and PRNG keys are never
      compressed by a codec or its text form.
    keep_args: positions of the arguments whose leaves stay uncompressed if they are residuals. Such
      arguments are in memory anyway, like parameters. None means all arguments. To compress an
      activation that is an argument of `f`, list only the positions of the parameters.

    Raises TagError if `codec` or `keep_args` has another form, if the codec that the function
    returned does not support its residual, and for a second derivative, because codes have no
    derivative.
    """
    if isinstance(codec, str):
        codec = parse(codec)
    if isinstance(codec, type) or not (isinstance(codec, Codec) or callable(codec)):
        raise TagError(
            f"compress_residuals: `codec` is {codec!r}; expected a codec, its text form, or a"
            " function from jax.ShapeDtypeStruct to a codec or None"
        )
    if keep_args is not None and not (
        isinstance(keep_args, tuple) and all(isinstance(i, int) for i in keep_args)
    ):
        raise TagError(
            f"compress_residuals: `keep_args` is {keep_args!r}; expected a tuple of positions, or"
            " None"
        )

    @functools.wraps(f)
    def compressed(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        held = _held(args, keep_args, leaves)
        function, arrays, closed_over = of_arrays(f, args, kwargs)
        raw = [h for h, leaf in zip(held, leaves) if isinstance(leaf, jax.Array)]
        raw += [True] * len(closed_over)
        return _with_codes(function, codec, raw)(*arrays, *closed_over)

    return compressed


def _with_codes(function, codec, raw: list[bool]):
    """Returns a function of arrays with a derivative rule that stores its residuals by `codec`.

    raw: for each array, whether it is stored uncompressed if it is a residual itself.
    """

    def hold(arrays, value, leaves):
        uncompressed = {id(a) for a, is_raw in zip(arrays, raw) if is_raw}
        decoders, stored = _store(leaves, uncompressed, codec)
        return value, functools.partial(_load, decoders), stored

    return saving(function, hold)


def _load(decoders: list[Callable], stored) -> list:
    """Decodes the residuals from the arrays that are stored for each."""
    return [decode(codes) for decode, codes in zip(decoders, stored)]


def _store(leaves, uncompressed: set[int], codec) -> tuple[list[Callable], list[tuple]]:
    """Encodes residuals, except those whose `id` is in `uncompressed`. Returns, for each residual,
    the function that decodes it and the arrays that are stored for it.
    """
    decoders, stored = [], []
    for leaf in leaves:  # JAX lists each residual once
        aval = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        chosen = None if id(leaf) in uncompressed else _chosen(codec, aval)
        if chosen is None:
            decoders.append(operator.itemgetter(0))
            stored.append((leaf,))
        else:
            decoders.append(lambda codes, c=chosen, a=aval: c.decode(codes, a.shape, a.dtype))
            stored.append(_encode(chosen, leaf))
    return decoders, stored


def _chosen(codec, aval: jax.ShapeDtypeStruct) -> Codec | None:
    """Returns the codec of one residual, by the rules of `compress_residuals`; None stores the
    residual uncompressed.
    """
    if aval.dtype != jnp.bool_ and not jnp.issubdtype(aval.dtype, jnp.inexact):
        return None
    if not isinstance(codec, Codec):
        return codec(aval) or (BitMask() if aval.dtype == jnp.bool_ else None)
    if aval.dtype == jnp.bool_:
        codec = BitMask()
    elif aval.dtype.name not in FLOATS:
        return None
    return codec if codec.nbytes(aval.shape, aval.dtype) < aval.size * aval.dtype.itemsize else None


def _encode(codec: Codec, x):
    """Returns `codec.encode(x)`, which refuses a derivative: JAX would silently take the derivative
    of the codes for the derivative of `x`.
    """
    return tuple(codec.encode(differentiable_once(x, TWICE)))


def _held(args, keep_args, leaves) -> list[bool]:
    """Returns whether each leaf of (args, kwargs) is stored uncompressed."""
    if keep_args is None:
        return [True] * len(leaves)
    if not all(0 <= i < len(args) for i in keep_args):
        raise TagError(
            f"compress_residuals: `keep_args` is {keep_args}; the call has {len(args)} positional"
            " arguments"
        )
    kept = [i in keep_args for i, a in enumerate(args) for _ in jax.tree.leaves(a)]
    return kept + [False] * (len(leaves) - len(kept))
