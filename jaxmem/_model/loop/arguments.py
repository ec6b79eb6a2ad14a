"""Checks the arguments of `stack`, and separates arrays with a gradient from arrays without a
gradient, since `jax.vjp` takes only the former.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._core.lists import merged, separated
from jaxmem._model.states.layout import parts_of
from jaxmem._trace.jaxpr import lift
from jaxmem.errors import StackError


def is_floating(a) -> bool:
    """Whether an array has a derivative: real floating-point and complex arrays do."""
    return jnp.issubdtype(jnp.result_type(a), jnp.inexact)


@dataclasses.dataclass(frozen=True)
class ParameterSplit:
    """Separates a layer's floating-point parameters, which have a gradient, from the other arrays
    of the layer, which have no gradient. The layer's key and frozen parameters belong to the other
    arrays.

    structure: the tree structure of the parameters.
    which: for each leaf, whether it has a gradient.
    dtype: the dtype in which a layer receives the parameters; None means their stored dtype.
    """

    structure: Any
    which: tuple[bool, ...]
    dtype: Any

    @staticmethod
    def of(params, dtype, frozen: int = 0) -> "ParameterSplit":
        """Returns the split of `params`, stacked or of one layer: only structure and dtypes are
        read. The last `frozen` leaves have no gradient.
        """
        leaves, structure = jax.tree.flatten(params)
        trained = map(is_floating, leaves[: len(leaves) - frozen])
        return ParameterSplit(structure, (*trained, *[False] * frozen), dtype)

    def own(self, layer, key, i) -> tuple[list, Any]:
        """Separates layer i's arrays into a pair: the floating-point leaves, which are
        differentiated, and (the other leaves, the layer's key).

        layer: the layer's parameters.
        key: the stack's key, or None.
        """
        floating, others = separated(jax.tree.leaves(layer), self.which)
        # A conversion here, after the read, copies one layer at a time, and not a whole stack.
        # Complex parameters are not converted.
        if self.dtype is not None:
            floating = [
                a.astype(self.dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
                for a in floating
            ]
        return floating, (others, None if key is None else jax.random.fold_in(key, i))

    def join(self, own) -> tuple[Any, Any]:
        """Returns the layer's parameters as a tree, and the layer's key: the arguments of
        `block`.
        """
        floating, (others, key) = own
        return jax.tree.unflatten(self.structure, merged((floating, others), self.which)), key

    def floating(self, params) -> list:
        """Returns the leaves of `params` that have a gradient."""
        return separated(jax.tree.leaves(params), self.which)[0]

    def whole(self, params, gradients: list):
        """Returns a tree like `params` of the gradients of its floating-point leaves.

        Gradients are converted to the dtypes of `params`, which undoes the conversion of `own`. If
        `params` has a part of an array (ZeRO), the gradient keeps its dtype: it is scattered in
        fewer bytes, as the array was gathered. Leaves without a gradient become None.
        """
        leaves = jax.tree.leaves(params)
        sources = merged((gradients, [None] * len(leaves)), self.which)

        def one(g, a):
            return g if g is None or g.shape != a.shape else g.astype(a.dtype)

        return jax.tree.unflatten(self.structure, list(map(one, sources, leaves)))


def check(params, x) -> list[int]:
    """Returns the number of layers of each stack of `params`.

    Raises StackError if `x` has an array without a derivative, or if `params` is not stacked.
    """
    why = ": give masks, positions and other indices after `x`, as what all layers share"
    _check_floating("x", x, why)
    return lengths_of(params)


def _check_floating(name: str, tree, why: str) -> None:
    """Raises StackError, which ends with `why`, if an array of the tree has no derivative."""
    for path, a in jax.tree.leaves_with_path(tree):
        if not is_floating(a):
            raise StackError(
                f"stack: `{name}{jax.tree_util.keystr(path)}` is {jax.typeof(a).str_short()};"
                f" expected floating-point arrays{why}"
            )


def lengths_of(params, name: str = "params") -> list[int]:
    """Returns the number of layers of each stack of `params`. Raises StackError, with `name` for
    `params`, if `params` is not stacked.
    """
    return [_leading(name, part) for part in parts_of(params)]


def check_moments(moments, params) -> None:
    """Raises StackError unless moments are floating-point arrays with the layers of `params`."""
    _check_floating("moments", moments, ", since the new moments are handed out as a gradient")
    found = lengths_of(moments, "moments"), lengths_of(params)
    if found[0] != found[1]:
        got, layers = (" + ".join(map(str, counts)) for counts in found)
        raise StackError(
            f"stack: `moments` holds {got} layers, and `params` {layers}; expected as many"
        )


def _leading(name: str, tree) -> int:
    """Returns the length of the leading axis that all arrays of a tree share, the axis of layers.

    `name` is the tree's name in errors. Raises StackError if there is no such axis.
    """
    leaves = jax.tree.leaves_with_path(tree)
    first: tuple[str, int] | None = None  # the first leaf's name and length
    for path, a in leaves:
        here = f"`{name}{jax.tree_util.keystr(path)}`"
        if not jnp.ndim(a) or not jnp.shape(a)[0]:
            raise StackError(
                f"stack: {here} has shape {jnp.shape(a)}; expected a leading axis of one entry a"
                " layer, at least one"
            )
        first = first or (here, jnp.shape(a)[0])
        if jnp.shape(a)[0] != first[1]:
            raise StackError(
                f"stack: {here} holds {jnp.shape(a)[0]} layers, and {first[0]} {first[1]}; expected"
                " one leading axis for all"
            )
    if first is None:
        raise StackError(
            f"stack: `{name}` holds no array; expected each layer's, stacked along a leading axis"
        )
    return first[1]


def lifted(block, split: ParameterSplit, own, x, shared, has_aux: bool):
    """Makes `block` a function of explicit arguments, `call(own, x, common) -> (x, aux)`.

    Returns `call` and `common`, the arrays that all layers read: `shared`, and the arrays that
    `block` closes over. `common` is a pair of the differentiated arrays and the other arrays.
    Closed-over arrays must become arguments, because `jax.custom_vjp` does not track closed-over
    tracers.

    `block` is traced once, for layer 0. Raises StackError unless it returns `x` with the structure,
    shapes and dtypes that it was given.

    block: the user's function of one layer.
    split: separates the parameters.
    own: the result of `split.own` for layer 0.
    x: the input of the first layer.
    shared: the tuple of the arguments of `block` after `x`.
    has_aux: whether `block` returns (x, aux).
    """
    leaves, structure = jax.tree.flatten(shared)
    box: dict[str, Any] = {}  # the structure of `block`'s result, known after the trace

    def once(own, x, leaves):
        p, k = split.join(own)
        out = block(
            p, x, *jax.tree.unflatten(structure, leaves), **({} if k is None else {"key": k})
        )
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise StackError(
                f"stack: `block` returned {type(out).__name__}; with has_aux=True it must return a"
                " pair (x, aux)"
            )
        out = out if has_aux else (out, None)
        _check_output(x, out[0])
        values, box["out"] = jax.tree.flatten(out)
        return values

    closed = jax.make_jaxpr(once)(own, x, leaves)
    function, closed_over = lift(closed)
    leaves = leaves + closed_over
    which = tuple(map(is_floating, leaves))
    count = len(leaves) - len(closed_over)  # `shared` comes first, then the closed-over arrays

    def call(own, x, common):
        every = merged(common, which)
        values = function(every[count:], *jax.tree.leaves((own, x, every[:count])))
        return jax.tree.unflatten(box["out"], values)

    return call, separated(leaves, which)


def _check_output(x, out) -> None:
    """Raises StackError unless `out` can replace `x` as the next layer's input."""
    if jax.tree.structure(x) != jax.tree.structure(out):
        raise StackError(
            f"stack: `block` returned {jax.tree.structure(out)} for `x`, and got"
            f" {jax.tree.structure(x)}; expected the same"
            " tree, since the next layer is given it (for a pair (x, aux), has_aux=True)"
        )
    for (path, a), b in zip(jax.tree.leaves_with_path(x), jax.tree.leaves(out)):
        if (jnp.shape(a), jnp.result_type(a)) != (jnp.shape(b), jnp.result_type(b)):
            raise StackError(
                f"stack: `block` returned `x{jax.tree_util.keystr(path)}` as"
                f" {jax.typeof(b).str_short()}, and got {jax.typeof(a).str_short()}; expected the"
                " same shape and dtype, since the next layer is given it"
            )
