"""Functions whose caller decides what their derivative saves."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._core.lists import merged, separated
from jaxmem._model.codecs.registry import EXACT
from jaxmem._model.tags.implementation import is_hijax
from jaxmem._model.tags.tag import tag
from jaxmem._trace.jaxpr import lift
from jaxmem.errors import TagError


def saving(function: Callable, hold: Callable[[Sequence, Any, list], tuple]) -> Callable:
    """Returns `function` with JAX's derivative, and with `hold` between residuals and saved arrays.

    function: a function of arrays to a tree of arrays. It closes over no array, since a derivative
      rule does not track closed-over arrays.
    hold: `hold(arrays, results, residuals)` returns the results, a function from the saved arrays
      to the residuals, and the saved arrays. JAX lists each residual once. A residual that is an
      argument or a result is the same Python object.
    """
    custom = jax.custom_vjp(function)

    def forward(*arrays):
        floating = [jnp.issubdtype(a.dtype, jnp.inexact) for a in arrays]

        # `jax.vjp` differentiates only floating-point arrays; other arrays are bound here.
        own, others = separated(arrays, floating)
        of_floating = lambda *given: function(*merged((given, others), floating))
        results, pullback = jax.vjp(of_floating, *own)
        # The pullback's leaves are its residuals.
        leaves, tree = jax.tree.flatten(pullback)
        results, load, stored = hold(arrays, results, leaves)
        # A `Partial` is a tree whose leaves are its arguments: the backward stores `stored`.
        return results, jax.tree_util.Partial(
            functools.partial(_pull, tree, load, tuple(floating)), stored
        )

    custom.defvjp(forward, lambda pull, cotangent: pull(cotangent))
    return custom


def _pull(tree, load: Callable, floating: tuple[bool, ...], stored, cotangent):
    """Rebuilds the pullback of the structure `tree` and calls it. Returns the cotangents of all
    arrays; None for an array that is not floating-point.
    """
    gradients = iter(jax.tree.unflatten(tree, load(stored))(cotangent))
    return tuple(next(gradients) if d else None for d in floating)


def tagging(function: Callable, name: str) -> Callable:
    """Returns `function` with a tag of this name for each tensor that its derivative saves, except
    its arguments. The tags have the kind `exact`, since a rule may depend on exact values: a
    codec's error in the logarithm of a softmax's sum would be an error of the exponent.
    """
    # Remove with today's checkpoint: the error, since both options are then on.
    if is_hijax() and not getattr(jax.config, "jax_custom_vjp3", False):
        raise TagError(
            f"tag {name!r}: the option jax_remat3 is on, and jax_custom_vjp3 is off; expected both"
            " on or both off, since jax.checkpoint otherwise recomputes every tag inside a"
            " derivative rule: jax.config.update('jax_custom_vjp3', True)"
        )

    def hold(arrays, results, leaves):
        known = {id(x): x for x in arrays}

        def own(x):
            if id(x) not in known:
                # Keys of random numbers have no bytes that could be saved.
                is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
                known[id(x)] = x if is_key else tag(x, name, kind=EXACT)
            return known[id(x)]

        stored = [own(x) for x in leaves]
        return jax.tree.map(lambda x: known.get(id(x), x), results), list, stored

    return saving(function, hold)


def of_arrays(f: Callable, args: tuple, kwargs: dict) -> tuple[Callable, list, list]:
    """Returns the call `f(*args, **kwargs)` as a function of arrays, the arrays among the
    arguments, and the arrays that `f` closes over. The function takes both lists of arrays, in this
    order. Arguments that are not arrays are passed to `f` unchanged.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [isinstance(a, jax.Array) for a in leaves]

    arrays, others = separated(leaves, traced)

    def call(*arrays):
        args, kwargs = jax.tree.unflatten(tree, merged((arrays, others), traced))
        return f(*args, **kwargs)

    closed, shapes = jax.make_jaxpr(call, return_shape=True)(*arrays)
    # For arrays of any dtype; `jax.closure_convert` lifts only floating-point arrays.
    lifted, closed_over = lift(closed)

    def function(*given):
        results = lifted(given[len(arrays) :], *given[: len(arrays)])
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return function, arrays, closed_over
