"""Functions whose derivative saves what their caller decides."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._model.codecs.registry import EXACT
from jaxmem._model.tags.tag import tag
from jaxmem._trace.jaxpr import lift


def saving(function: Callable, hold: Callable[[Sequence, Any, list], tuple]) -> Callable:
    """`function` with the derivative that JAX gives it, whose residuals `hold` makes into what is
    saved of them.

    function: of arrays, to a tree of arrays; it closes over none, since a rule does not track them.
    hold: from the arrays, the results and the residuals to (the results, a function from what is
      saved back to the residuals, what is saved). JAX lists each residual once, and one that is an
      array or a result is the same object.
    """
    custom = jax.custom_vjp(function)

    def forward(*arrays):
        floating = [jnp.issubdtype(a.dtype, jnp.inexact) for a in arrays]

        # `jax.vjp` differentiates floating arrays alone; the others are bound here.
        def of_floating(*given):
            given = iter(given)
            return function(*(next(given) if d else a for a, d in zip(arrays, floating)))

        results, pullback = jax.vjp(of_floating, *(a for a, d in zip(arrays, floating) if d))
        # The pullback's leaves are its residuals.
        leaves, tree = jax.tree.flatten(pullback)
        results, load, stored = hold(arrays, results, leaves)
        # A `Partial` is a tree whose leaves are its arguments: what the backward holds is `stored`.
        return results, jax.tree_util.Partial(
            functools.partial(_pull, tree, load, tuple(floating)), stored
        )

    custom.defvjp(forward, lambda pull, cotangent: pull(cotangent))
    return custom


def _pull(tree, load: Callable, floating: tuple[bool, ...], stored, cotangent):
    """Rebuilds the pullback of the structure `tree` and calls it. Returns the cotangents of all
    arrays, None for those that are not `floating`.
    """
    gradients = iter(jax.tree.unflatten(tree, load(stored))(cotangent))
    return tuple(next(gradients) if d else None for d in floating)


def tagging(function: Callable, name: str) -> Callable:
    """`function` of arrays, with a tag of this name for each tensor that its derivative saves and
    that is none of them. They are exact, since a rule reads what it saves for what it is: a codec's
    error in the logarithm of a softmax's sum would be an error of the exponent.
    """

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
    """The call `f(*args, **kwargs)` as (a function of arrays, those among the arguments, those that
    `f` closes over); the function takes both, in this order. `f` gets what is no array unchanged.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    traced = [isinstance(a, jax.Array) for a in leaves]

    def call(*arrays):
        left = iter(arrays)
        args, kwargs = jax.tree.unflatten(
            tree, [next(left) if t else a for t, a in zip(traced, leaves)]
        )
        return f(*args, **kwargs)

    arrays = [a for a, t in zip(leaves, traced) if t]
    closed, shapes = jax.make_jaxpr(call, return_shape=True)(*arrays)
    # Of any dtype, where `jax.closure_convert` makes arguments of floating arrays alone.
    lifted, closed_over = lift(closed)

    def function(*given):
        results = lifted(given[len(arrays) :], *given[: len(arrays)])
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return function, arrays, closed_over
