"""compress_residuals(): makes a function hold encoded what its backward needs.

It serves functions outside `jax.checkpoint`, and those that own their residuals by a
`jax.custom_vjp` rule.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._codecs.base import FLOATS, Codec
from jaxmem._codecs.mask import BitMask
from jaxmem._codecs.registry import parse
from jaxmem._tags.tag import differentiable_once
from jaxmem.errors import TagError

TWICE = (
    "compress_residuals: differentiated twice, and codes have no derivative; expected one"
    " derivative of it:"
    " leave the function as it is where a second one is taken, or recompute it with jax.checkpoint"
)
# from a residual's shape and dtype to its codec, or None to hold it as it is
Choose = Callable[[jax.ShapeDtypeStruct], Codec | None]


def compress_residuals(
    f: Callable, codec: Codec | str | Choose, *, keep_args: tuple[int, ...] | None = None
) -> Callable:
    """Makes a function equal to `f`, whose `jax.vjp` holds encoded what the backward needs of it.

    f: any differentiable function. Its arguments are pytrees: of `jax.Array`s, of which the
      floating ones have a gradient, and of anything else (Python numbers, text), which `f` gets
      unchanged. Floating arrays that `f` closes over count as kept.
    codec: a codec, or its text form, for every floating residual that it makes smaller; or a
      function from a residual's `jax.ShapeDtypeStruct` to its codec, or None to keep it. Residuals
      of bool (dropout masks) become one bit a value with either, unless that function returns a
      codec; integers and PRNG keys are held uncompressed.
    keep_args: positions of the arguments whose leaves are held uncompressed where they are
      residuals, being in memory anyhow (parameters). None means all of them; name the parameters
      alone where an activation that enters `f` is to be compressed.

    The value is `f`'s to the bit; the gradient is `f`'s, taken at the decoded residuals. Runs under
    jit, grad, vmap and scan, in reverse mode.

    Raises TagError if `codec` or `keep_args` is something else, if the codec chosen by a function
    cannot take its residual, and on a second derivative, which would be wrong.
    """
    if isinstance(codec, str):
        codec = parse(codec)
    if isinstance(codec, type) or not (isinstance(codec, Codec) or callable(codec)):
        raise TagError(
            f"compress_residuals: `codec` is {codec!r}; expected a codec, its text form, or a"
            " function from"
            " jax.ShapeDtypeStruct to a codec or None"
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
        # What is no array stays in the closure of `of_arrays`, and `f` gets it unchanged.
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [isinstance(a, jax.Array) for a in leaves]
        held = _held(args, keep_args, leaves)

        def of_arrays(*arrays):
            arrays = iter(arrays)
            args, kwargs = jax.tree.unflatten(
                tree, [next(arrays) if t else a for t, a in zip(traced, leaves)]
            )
            return f(*args, **kwargs)

        # `jax.custom_vjp` does not track arrays that are closed over, so they become arguments too.
        arrays = [a for a, t in zip(leaves, traced) if t]
        function, closed_over = jax.closure_convert(of_arrays, *arrays)
        raw = [h for h, t in zip(held, traced) if t] + [True] * len(closed_over)
        return _with_codes(function, codec, raw)(*arrays, *closed_over)

    return compressed


def _with_codes(function, codec, raw: list[bool]):
    """Gives a function of arrays a derivative rule that stores its residuals by `codec`.

    `raw` says for each array whether it is held as it is where it is a residual itself.
    """
    custom = jax.custom_vjp(function)

    def forward(*arrays):
        floating = [jnp.issubdtype(a.dtype, jnp.inexact) for a in arrays]

        # `jax.vjp` differentiates floating arrays alone; the others are bound here.
        def of_floating(*given):
            given = iter(given)
            return function(*(next(given) if d else a for a, d in zip(arrays, floating)))

        value, pullback = jax.vjp(of_floating, *(a for a, d in zip(arrays, floating) if d))
        # The pullback's leaves are its residuals. One that is an argument of `function` is the same
        # object as that argument, so identity tells which they are.
        leaves, tree = jax.tree.flatten(pullback)
        slots, stored = _store(leaves, {id(a) for a, r in zip(arrays, raw) if r}, codec)
        # A `Partial` is a tree whose leaves are its arguments: what the backward holds is `stored`.
        return value, jax.tree_util.Partial(
            functools.partial(_pull, tree, slots, tuple(floating)), stored
        )

    custom.defvjp(forward, lambda pull, cotangent: pull(cotangent))
    return custom


def _pull(tree, slots, floating: tuple[bool, ...], stored, cotangent):
    """Decodes the residuals, rebuilds the pullback and calls it. Returns the cotangents of all
    arrays, None for those that are not floating.

    tree: the structure of the pullback.
    slots: how each of its leaves is read back.
    floating: for each array, whether it has a cotangent.
    stored: what is held for each slot.
    cotangent: that of the function's value.
    """
    gradients = iter(
        jax.tree.unflatten(tree, [s.load(c) for s, c in zip(slots, stored)])(cotangent)
    )
    return tuple(next(gradients) if d else None for d in floating)


@dataclasses.dataclass(frozen=True)
class _Slot:
    """How one residual is read back: by `codec`, to an array of this shape and dtype; without a
    codec it is held as it is.
    """

    codec: Codec | None
    shape: tuple[int, ...]
    dtype: np.dtype

    def load(self, codes):
        return codes[0] if self.codec is None else self.codec.decode(codes, self.shape, self.dtype)


def _store(leaves, held: set[int], codec) -> tuple[tuple[_Slot, ...], list[tuple]]:
    """Encodes residuals, but for those whose `id` is in `held`: returns how each is read back, and
    the arrays that are held for it.
    """
    slots, stored = [], []
    for leaf in leaves:  # JAX lists each residual once
        chosen = (
            None
            if id(leaf) in held
            else _chosen(codec, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        )
        slots.append(_Slot(chosen, leaf.shape, leaf.dtype))
        stored.append((leaf,) if chosen is None else _encode(chosen, leaf))
    return tuple(slots), stored


def _chosen(codec, aval: jax.ShapeDtypeStruct) -> Codec | None:
    """The codec of one residual, by the rules of `compress_residuals`; None holds it as it is."""
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
    """`codec.encode(x)`, refusing a derivative: that of the codes would silently be taken for that
    of `x`.
    """
    return tuple(codec.encode(differentiable_once(x, TWICE)))


def _held(args, keep_args, leaves) -> list[bool]:
    """Whether each leaf of (args, kwargs) is held uncompressed."""
    if keep_args is None:
        return [True] * len(leaves)
    if not all(0 <= i < len(args) for i in keep_args):
        raise TagError(
            f"compress_residuals: `keep_args` is {keep_args}; the call has {len(args)} positional"
            " arguments"
        )
    kept = [i in keep_args for i, a in enumerate(args) for _ in jax.tree.leaves(a)]
    return kept + [False] * (len(leaves) - len(kept))
